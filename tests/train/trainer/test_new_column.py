"""A column that only this test declares goes from an engine reply to the loss; no code on the way lists columns."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dppo_megatron.bank import BankCorruption, BankReader, BankWriter
from dppo_megatron.bank.audit import audit_bank
from dppo_megatron.bank.checks import check_group
from dppo_megatron.config import with_settings
from dppo_megatron.data.packing import TokenSequence, pack
from dppo_megatron.objectives import Objective, ObjectiveSettings
from dppo_megatron.rollout.engines.protocol import GenerateRequest, InvalidSample
from dppo_megatron.rollout.engines.samples import GroupSamples
from dppo_megatron.rollout.engines.vllm.extension.bodies import GenerateBody, parse
from dppo_megatron.rollout.engines.vllm.extension.wire import (
    decode_reply,
    decode_samples,
    encode_request,
    encode_samples,
)
from dppo_megatron.rollout.environments.dialogue import Piece
from dppo_megatron.rollout.environments.episodes import Episodes, training_requests
from dppo_megatron.rollout.environments.trajectory import Trajectory
from dppo_megatron.rollout.fleet.pool import FixedEngines
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.train.actor import apply_objective, forward
from dppo_megatron.train.actor.batch.packing import Packer
from dppo_megatron.train.trainer.batches import BankBatches, BankMismatch
from dppo_megatron.types import COLUMNS, ENVIRONMENT, POLICY, Column, Prompt, Rollout, RolloutGroup
from tests.support.audit import audit
from tests.support.configs import make_config
from tests.support.tiny_task import write_config_json

ADDED = [
    Column("made_score", ("float64",), "sampled", packed="float32", fill=-7),
    Column("made_pair", ("int32",), "sampled", ("D",), asked_by="made", part="topk", packed="int64", fill=-1),
    Column("made_list", ("int32",), "listed", counts="made_counts", part="sampling_mask", packed="int32"),
    Column("made_counts", ("int32",), "sampled", part="sampling_mask", packed="int32"),
    Column("made_read", ("uint8",), "read", ("E",), part="routes", packed="int16", fill=-1),
]


class Made(Objective):
    """Adds the made-up values to the loss."""

    needs_columns = ("made_score", "made_pair")

    def __call__(self, *, made_score, made_pair, **given):
        out = super().__call__(**given)
        return replace(out, loss=out.loss + torch.where(given["mask"], made_score + made_pair[:, 1], 0))


FAILED = Trajectory([], "abort", None, [])
OBJECTIVE = Made("made", ObjectiveSettings(control="none", importance="none"))
CONFIG = make_config(
    objective={"name": f"{__name__}:OBJECTIVE"},
    rollout={"group_size": 3, "prompts_per_step": 1, "max_response_tokens": 5},
    train={"updates_per_step": 1},
)
PROMPT = Prompt(4, 2, np.array([3, 1], np.int32), "text", "answer")
VOCAB = 100


@pytest.fixture(autouse=True)
def columns():
    COLUMNS.extend(ADDED)
    yield
    del COLUMNS[-len(ADDED) :]


def made(tokens: list[int], read: list[int]) -> dict[str, np.ndarray]:
    """Values that name their token."""
    return {
        "rollout_logprob": np.array(tokens, np.float32) * -0.01,
        "versions": np.full(len(tokens), 1, np.int32),
        "made_score": np.array(tokens) * 0.5,
        "made_pair": np.array([[t, t + 1] for t in tokens], np.int32).reshape(-1, 2),
        "made_list": np.array([t for t in tokens for _ in range(t % 4)], np.int32),
        "made_counts": np.array([t % 4 for t in tokens], np.int32),
        "made_read": np.array([[t, 7, t] for t in read], np.uint8).reshape(-1, 3),
    }


class Engine:
    """Continues n with n + 11, five tokens a sample; the first call for each is interrupted after two of them."""

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        sent = parse(GenerateBody, encode_request(request)).request()
        assert b"flags" not in encode_request(replace(request, flags=()))  # the bytes of a request without any
        size = min(request.max_tokens, 2 if "+" not in request.request_id else 5)
        samples = []
        for seed in range(request.n):
            own = [(int(request.token_ids[-1]) + 11 * (i + 1) + seed) % VOCAB for i in range(size)]
            columns = made(own, [*request.token_ids.tolist(), *own][:-1])
            columns = {name: array for name, array in columns.items() if name != "made_pair" or "made" in sent.flags}
            reason = "length" if size == request.max_tokens else "abort"
            samples.append(Rollout.from_columns(columns, token_ids=np.array(own, np.int32), finish_reason=reason))
        header, arrays = decode_reply(encode_samples({}, GroupSamples.from_rollouts(samples)))
        found = decode_samples(header, arrays)
        found.check(request, vocab_size=VOCAB, max_model_len=64)
        with pytest.raises(InvalidSample, match="made_pair, which was not requested"):
            found.check(replace(request, flags=()), vocab_size=VOCAB, max_model_len=64)
        for name in ("made_score", "made_pair", "made_list", "made_read"):
            with pytest.raises(InvalidSample, match=rf"{name} is of shape \(\d+,.*expected"):
                replace(found, columns=found.columns | {name: found.columns[name][:-1]}).check(
                    request, vocab_size=VOCAB, max_model_len=64
                )
        return found.rollouts(len(request.token_ids))


def sample(token_ids: np.ndarray, n: int, name: str) -> tuple[Rollout, ...]:
    request = training_requests(CONFIG, ())(
        request_id=name, token_ids=token_ids, seeds=range(CONFIG.rollout.group_size)
    )
    request = replace(request, n=n, seeds=request.seeds[:n])
    return asyncio.run(Sampler(FixedEngines([Engine()])).generate(request))


def sampled_group() -> tuple[RolloutGroup, dict[tuple[int, int, int], Rollout]]:
    """A trajectory that failed at once, one of two turns with an environment's answer between them, one of one turn."""
    first, single = sample(PROMPT.token_ids, 2, "first")
    answer = np.array([90, 91, 92], np.int32)
    (second,) = sample(np.concatenate([PROMPT.token_ids, first.token_ids, answer]), 1, "second")
    branches = (
        [
            Piece(ENVIRONMENT, 0, "", PROMPT.token_ids),
            Piece(POLICY, 0, "", first.token_ids, first),
            Piece(ENVIRONMENT, 0, "", answer),
            Piece(POLICY, 1, "", second.token_ids, second),
        ],
        [Piece(ENVIRONMENT, 0, "", PROMPT.token_ids), Piece(POLICY, 0, "", single.token_ids, single)],
    )
    played = [Trajectory([branch], "length", reward, []) for branch, reward in zip(branches, (1.0, 0.0), strict=True)]
    return grouped([FAILED, *played]), {(4, 1, 0): first, (4, 1, 1): second, (4, 2, 0): single}


def grouped(played: list[Trajectory]) -> RolloutGroup:
    request = training_requests(CONFIG, ())(request_id="g", token_ids=PROMPT.token_ids, seeds=range(len(played)))
    episodes = Episodes(
        CONFIG, sample=None, environments=None, tokenizer=None, tools=(), stop_token_ids=(), routing=None
    )
    return episodes._group(PROMPT, request, played)


def test_a_new_column_arrives_at_its_token(tmp_path, monkeypatch):
    group, turns = sampled_group()
    with BankWriter(tmp_path, 1) as writer:
        writer.append(group)
        cut = {"made_score": group.rollouts[2].extra["made_score"][:-1]}
        wrong = replace(group.rollouts[2], extra=group.rollouts[2].extra | cut)
        with pytest.raises(
            ValueError, match=r"sample 2: made_score: expected numpy float64 \(5,\), found float64 \(4,\)"
        ):
            writer.append(replace(group, prompt=replace(PROMPT, position=5), rollouts=(*group.rollouts[:2], wrong)))
    reader = BankReader(tmp_path)
    (entry,) = reader.entries(0, reader.refresh())
    stored = reader.read(entry)
    assert reader.read(entry, parts=("core",)).rollouts[0].extra.keys() == {"made_score"}
    assert audit([stored], turns).problems == list(audit_bank(tmp_path))[-1][2].problems == []
    changed = turns | {(4, 1, 1): replace(turns[4, 1, 1], extra={})}
    assert "made_score, made_pair, made_list, made_counts differ" in audit([stored], changed).problems[0]

    sequences = [
        TokenSequence.from_rollout(PROMPT, r, advantage=1.0, loss_weight=0.1, replay_routing=True)
        for r in stored.rollouts[1:]
    ]
    batch = pack(sequences)
    assert batch.extra["made_score"][~batch.mask].unique().tolist() == [-7]
    assert [batch.extra[c.name].dtype for c in ADDED] == [getattr(torch, c.packed) for c in ADDED]
    seen, loss = rows_of_the_loss(batch, monkeypatch)
    targets = [t for r in stored.rollouts[1:] for t in r.token_ids[... if r.sampled is None else r.sampled].tolist()]
    assert seen.target_ids.tolist() == targets
    assert seen.token_ids.tolist()[:2] == [1, 12]
    expected = made(targets, seen.token_ids.tolist())
    for column in ADDED:
        assert seen.extra[column.name].tolist() == expected[column.name].tolist(), column.name
    assert loss == pytest.approx(sum(0.1 * (0.5 * t + t + 1) for t in targets))


def test_a_group_without_any_turn_has_the_columns():
    group = grouped([FAILED] * 3)
    check_group(group)
    assert {name: array.shape for name, array in group.rollouts[0].extra.items()} == {
        "made_score": (0,), "made_pair": (0, 0), "made_list": (0,), "made_counts": (0,), "made_read": (1, 0)
    }  # fmt: skip


def rows_of_the_loss(batch, monkeypatch):
    """Return what `LossStep` passes to `apply_objective`, and the loss."""
    seen = []

    def statistics(model, output, rows, *_, **__):
        zeros = torch.zeros(len(rows.target_ids))
        return SimpleNamespace(logprob=zeros, topk_logprob=None, other_logprob=None, entropy=zeros, nonfinite=zeros > 0)

    def recorded(objective, rows, **given):
        seen.append(rows)
        return apply_objective(objective, rows, **given)

    monkeypatch.setattr(forward, "head_statistics", statistics)
    monkeypatch.setattr(forward, "apply_objective", recorded)
    packer = Packer(device=torch.device("cpu"), dtype=torch.float32, frequencies=None, vocab_size=VOCAB, multiple=4)
    layout = SimpleNamespace(context_size=1, context_rank=0)
    step = forward.LossStep(OBJECTIVE, VOCAB, layout, torch.zeros(VOCAB).long())
    loss, _, _ = step.loss(packer(batch), None, None)
    return seen[0], loss.item()


def with_model(directory):
    return with_settings(CONFIG, model={"path": write_config_json(directory)}, rollout={"max_response_tokens": 10})


def test_a_rank_without_samples_has_the_columns(tmp_path, monkeypatch):
    with BankWriter(tmp_path, 1) as writer:
        writer.append(sampled_group()[0])
    parts = ("core", "topk", "sampling_mask")
    batches = []
    for rank in range(3):
        source = BankBatches(with_model(tmp_path), BankReader(tmp_path), OBJECTIVE, rank, 3, parts)
        source.ready(0)
        (update,) = source.read(0).updates
        batches += update.micro_batches
    whole, _, filler = sorted(batches, key=lambda batch: -len(batch.token_ids))
    assert filler.mask.tolist() == [False]
    assert filler.extra.keys() == whole.extra.keys() == {c.name for c in ADDED} - {"made_read"}
    for name, tensor in filler.extra.items():
        assert tensor.dtype == whole.extra[name].dtype, name
        assert tensor.shape == (int(name != "made_list"), *whole.extra[name].shape[1:]), name
    rows, loss = rows_of_the_loss(filler, monkeypatch)
    assert rows.extra["made_pair"].tolist() == [[-1, -1]]
    assert loss == 0


def test_a_bank_without_a_needed_column_is_one_clear_error(tmp_path):
    with BankWriter(tmp_path, 1) as writer:
        writer.append(sampled_group()[0])

    class Needy(Made):
        needs_columns = ("made_score", "made_other")

    source = BankBatches(with_model(tmp_path), BankReader(tmp_path), Needy("needy", OBJECTIVE.settings), 0, 1)
    source.ready(0)
    with pytest.raises(BankMismatch, match=r"objective.name = .*prompt 4 in the bank has no made_other; use one that"):
        source.read(0)


def test_a_bank_with_a_column_of_another_version_is_one_clear_error(tmp_path):
    with BankWriter(tmp_path, 1) as writer:
        writer.append(sampled_group()[0])
    reader = BankReader(tmp_path)
    reader.refresh()
    COLUMNS[:] = [column for column in COLUMNS if column.name != "made_pair"]
    try:
        with pytest.raises(BankCorruption, match="columns made_pair, which this version does not know"):
            reader.entries(0, 1)
    finally:
        COLUMNS.insert(len(COLUMNS) - 3, ADDED[1])
