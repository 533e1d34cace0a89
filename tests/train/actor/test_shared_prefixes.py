"""A prompt that is computed once for all of its samples: the same numbers as when each sequence is computed whole."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoModelForCausalLM

from dppo_megatron.common.row_math import rope_tables
from dppo_megatron.lab.certify.rank import ScoredResponse, _Measurement
from dppo_megatron.train.actor import check_model
from dppo_megatron.train.actor.batch.context import rows_of_rank
from dppo_megatron.train.actor.batch.flash import plan_flash
from dppo_megatron.train.actor.batch.packing import PackedSequences, Packer
from dppo_megatron.train.actor.batch.prefixes import shared_rows
from dppo_megatron.train.actor.batch.segments import plan_segments
from dppo_megatron.train.actor.local.attention import PackedAttention
from dppo_megatron.train.actor.local.flash import FlashAttention
from dppo_megatron.types import Prompt, Rollout, TokenBatch
from tests.support import flash as flash_on_the_cpu  # noqa: F401
from tests.support.actor_cases import DEEPSEEK, QWEN3_5, QWEN3_MOE, VOCAB, actor_config, pack, sequences, write_config
from tests.support.actor_ranks import Rank
from tests.train.actor.scenarios import update

RUNS = st.lists(  # of sequences: the prefix of a run, and the tokens behind it of each sequence
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 60), min_size=1, max_size=5)), min_size=1, max_size=6
)


def batch_of(runs) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens, shared_prefix) of those runs."""
    lengths, shared = [], []
    for prefix, behind in runs:
        for number, more in enumerate(behind):
            lengths.append(max(1, prefix + more))
            shared.append(prefix if number else 0)
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int(), torch.tensor(shared).int()


@given(RUNS)
@settings(max_examples=200, deadline=None)
def test_every_token_has_a_row_of_its_own_kind(runs):
    bounds, shared = batch_of(runs)
    rows = shared_rows(bounds, shared)
    tokens = torch.arange(int(bounds[-1]))
    # A token and the one whose row it shares lie at the same place of two sequences of one run.
    first = rows.origin[rows.row]
    column = tokens - bounds[:-1].long().repeat_interleave(bounds.long().diff())
    assert torch.equal(column[first], column)
    assert torch.equal(rows.origin.sort().values.unique(), rows.origin.sort().values)
    assert len(rows.origin) == int(bounds[-1]) - int(shared.sum())
    assert int(rows.bounds[-1]) == len(rows.origin)
    assert len(rows.prefixes) == len(rows.bounds) - 1
    # What a segment continues lies before it and is one whole segment.
    for (begin, count), start in zip(rows.prefixes.tolist(), rows.bounds.tolist(), strict=False):
        if count:
            assert begin + count <= start
            assert begin in rows.bounds
            assert begin + count in rows.bounds


@pytest.mark.parametrize(("lengths", "shared"), [([5, 5], [2, 0]), ([5, 5, 5], [0, 2, 3]), ([5, 2], [0, 3])])
def test_prefixes_that_cannot_be_shared_are_refused(lengths, shared):
    with pytest.raises(ValueError, match="contradicts sequences"):
        shared_rows(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)), torch.tensor(shared))


@given(RUNS, st.booleans())
@example([(0, [200, 1, 31, 33, 64, 50, 120, 7, 199])], True)
@example([(0, [41])], False)
@settings(max_examples=40, deadline=None)
def test_attention_is_that_of_each_sequence_by_itself(runs, with_rope):
    bounds, shared = batch_of(runs)
    rows = shared_rows(bounds, shared)
    heads, groups, size, total = 4, 2, 16, int(bounds[-1])
    generator = torch.Generator().manual_seed(0)

    def leaf(count: int) -> torch.Tensor:
        return torch.randn(len(rows.origin), count, size, generator=generator, dtype=torch.float64, requires_grad=True)

    inputs = leaf(heads), leaf(groups), leaf(groups)
    upstream = torch.randn(total, heads * size, generator=generator, dtype=torch.float64)
    column = torch.arange(total) - bounds[:-1].long().repeat_interleave(bounds.long().diff())
    frequencies = 1.0 / 100.0 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    attention = PackedAttention(
        TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=heads), layer_number=1
    )
    rope = rope_tables(frequencies, column[rows.origin], torch.float64) if with_rope else None
    packed = PackedSequences(qkv_format="thd", plan=plan_segments(rows.bounds, rows.prefixes), rope=rope)
    got = attention(*inputs, None, packed_seq_params=packed)[rows.row]
    spans = [slice(*span) for span in pairwise(bounds.tolist())]
    whole = [x[rows.row] for x in inputs]
    expected = torch.cat([_alone(*(x[span] for x in whole), frequencies if with_rope else None) for span in spans])
    torch.testing.assert_close(got, expected)
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frequencies: torch.Tensor | None) -> torch.Tensor:
    if frequencies is not None:
        angles = torch.arange(len(q))[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def turned(x: torch.Tensor) -> torch.Tensor:
            pairs = torch.complex(*x.chunk(2, dim=-1)) * turn
            return torch.cat((pairs.real, pairs.imag), dim=-1)

        q, k = turned(q), turned(k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    return out[0].transpose(0, 1).flatten(1)


@given(RUNS, st.booleans(), st.sampled_from([(2, 16), (4, 12), (1, 16)]))
@settings(max_examples=40, deadline=None)
def test_flash_attention_is_that_of_padded_segments(runs, shared, heads):
    """The plan for GPUs and the merge of its two calls, with grouped heads and with narrower values (latent attention).

    The operators are those of `tests.support.flash`.
    """
    bounds, prefix = batch_of(runs)
    rows = shared_rows(bounds, prefix if shared else torch.zeros_like(prefix))
    (groups, width), generator = heads, torch.Generator().manual_seed(0)
    sizes = (4, 16), (groups, 16), (groups, width)
    inputs = [torch.randn(len(rows.origin), *size, generator=generator, requires_grad=True) for size in sizes]
    upstream = torch.randn(len(rows.origin), 4 * width, generator=generator)
    attention = PackedAttention(TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4), layer_number=1)
    found = []
    for plan in (
        plan_flash(rows.bounds, rows.prefixes, 0, 1, bounds.device),
        plan_segments(rows.bounds, rows.prefixes),
    ):
        out = attention(*inputs, None, packed_seq_params=PackedSequences(qkv_format="thd", plan=plan))
        found.append((out, *torch.autograd.grad(out, inputs, upstream)))
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() < 1e-6 * (theirs.norm() + upstream.norm())  # a row's only key has no gradient


def test_flash_attention_of_a_group_reads_its_prompt_once():
    bounds, shared = batch_of([(0, [4]), (3, [2, 1, 5]), (2, [1, 1])])
    rows = shared_rows(bounds, shared)
    plan = plan_flash(rows.bounds, rows.prefixes, 0, 1, bounds.device)
    assert plan.segments[0].tolist() == rows.bounds.tolist() == [0, 4, 7, 9, 10, 15, 17, 18, 19]
    assert plan.rows.tolist() == [*range(7, 15), 17, 18]
    assert plan.keys.tolist() == [4, 5, 6, 15, 16]
    assert [x.tolist() if isinstance(x, torch.Tensor) else x for x in plan.prefixes] == [
        [0, 8, 10], [0, 3, 5], 8, 3, 0.0, False
    ]  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_flash_attention_of_context_parallel_ranks_is_that_of_one(size):
    lengths = torch.tensor([4 * size, 2 * size, 10 * size])
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(int(bounds[-1]), n, 16, generator=generator, requires_grad=True) for n in (4, 2, 2)]
    upstream = torch.randn(int(bounds[-1]), 4, 16, generator=generator)
    whole = plan_flash(bounds, None, 0, 1, bounds.device)
    assert whole.prefixes is None
    expected = FlashAttention.apply(*inputs, *inputs[1:], whole, None)
    places = [rows_of_rank(bounds, rank, size) for rank in range(size)]
    gathered = [x[torch.cat(places)] for x in inputs[1:]]
    parts = [
        FlashAttention.apply(
            *(x[own] for x in inputs), *gathered, plan_flash(bounds, None, rank, size, bounds.device), None
        )
        for rank, own in enumerate(places)
    ]
    got = torch.empty_like(expected).index_copy(0, torch.cat(places), torch.cat(parts))
    gradients = [torch.autograd.grad(out, inputs, upstream) for out in (got, expected)]
    for mine, theirs in zip((got, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (mine - theirs).norm() < 1e-6 * theirs.norm()


def test_unshared_sequences_use_causal_attention_without_a_mask():
    """Whole sequences use causal attention without a mask, in one call of their own."""
    bounds, shared = batch_of([(0, [40]), (30, [5, 9]), (0, [41])])
    rows = shared_rows(bounds, shared)
    plan = plan_segments(rows.bounds, rows.prefixes)
    assert [(n, queries, keys) for n, queries, keys in plan.groups] == [(3, 41, 41), (2, 9, 39)]


@pytest.mark.parametrize("family", ["dense", "tied", "experts", "sinks", "lora", "recompute"])
def test_loss_and_gradients_are_those_of_whole_sequences(one_rank, family):
    whole, shared = one_rank(update.shared_prefixes)[family]
    assert shared["rows"] < 0.7 * whole["rows"]
    assert shared["tokens"] == whole["tokens"]
    assert shared["loss_tokens"] == whole["loss_tokens"]
    torch.testing.assert_close(shared["logprobs"], whole["logprobs"], rtol=1e-5, atol=1e-5)
    assert shared["masked"] == whole["masked"]
    torch.testing.assert_close(shared["loss"], whole["loss"], rtol=1e-5, atol=1e-7)
    for name, gradient in whole["gradients"].items():
        torch.testing.assert_close(shared["gradients"][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_layers_that_compute_whole_sequences_refuse_them():
    batch = replace(pack(sequences(2)), shared_prefix=torch.tensor([0, 1]))
    for layers in ({"own_attention": False}, {"delta_net": True}):
        packer = Packer(device=torch.device("cpu"), dtype=torch.float32, frequencies=None, **layers)
        with pytest.raises(ValueError, match="share_prefixes"):
            packer(batch)


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        (DEEPSEEK, {}, "latent attention"),
        (QWEN3_5, {}, "gated delta net"),
        ({}, {"parallel": {"context": 2, "world_size": 2}}, "parallel.context"),
        ({}, {"sections": {"engine": {"exact": True, "dtype": "fp32"}}}, "engine.exact"),
        (QWEN3_MOE, {"sections": {"rollout": {"routing_replay": True}}}, "rollout.routing_replay"),
    ],
)
def test_unsupported_prefix_sharing_is_refused_only_if_it_is_requested(tmp_path, model, changes, named):
    def problems(share: bool | None) -> list[str]:
        sections = {"train": {"steps": 1, "share_prefixes": share}, **changes.get("sections", {})}
        own = {name: value for name, value in changes.items() if name != "sections"}
        found = check_model(actor_config(write_config(tmp_path, **model), sections=sections, **own))
        return [line for line in found if line.startswith("train.share_prefixes")]

    assert problems(None) == problems(False) == []
    (line,) = problems(True)
    assert named in line
    assert "set train.share_prefixes to false" in line


TEMPERATURE, SAMPLES = 0.7, 4
PROMPTS, RESPONSE = (40, 23), 30


def certified(rank: Rank) -> dict[str, tuple[dict[str, Any], list[TokenBatch]]]:
    """By precision: the tables, and the micro-batches of the first pass."""
    return {dtype: _measured(rank, dtype) for dtype in ("fp32", "bf16")}


def _measured(rank: Rank, dtype: str) -> tuple[dict[str, Any], list[TokenBatch]]:
    known = AutoModelForCausalLM.from_pretrained(rank.models / "qwen3", dtype=torch.float32)
    generator = np.random.default_rng(0)

    def sample(prompt: Prompt) -> ScoredResponse:
        response = generator.integers(0, VOCAB, RESPONSE, dtype=np.int32)
        tokens = torch.from_numpy(np.concatenate([prompt.token_ids, response]).astype(np.int64))
        with torch.no_grad():
            logits = known(tokens[None]).logits[0, :-1]
        at_one, at_run = (
            torch.log_softmax(logits / t, -1).gather(1, tokens[1:, None])[:, 0].numpy() for t in (1.0, TEMPERATURE)
        )
        rollout = Rollout(response, at_run[-RESPONSE:], np.zeros(RESPONSE, np.int32), "stop")
        return ScoredResponse(prompt, rollout, at_one, at_one)

    prompts = [
        Prompt(n, n, generator.integers(0, VOCAB, size, dtype=np.int32), "", "") for n, size in enumerate(PROMPTS)
    ]
    samples = [sample(prompt) for prompt in prompts for _ in range(SAMPLES)]
    settings, passes = {"dtype": dtype}, []
    with rank.actor(settings=settings, sections={"rollout": {"temperature": TEMPERATURE}}) as actor:
        assert actor.shares_prefixes
        logprobs = actor.logprobs
        actor.logprobs = lambda batches: passes.append(batches) or logprobs(batches)
        tables = _Measurement(actor.config, actor, None, "")._logprobs(samples)[0]
    return tables, passes[0]


SHARED, WHOLE = "engine sampled, trainer packed", "trainer: packed with prompts once, whole"


@pytest.mark.slow
def test_a_certificate_compares_the_pass_of_training_at_the_temperature_of_the_run(one_rank):
    """Packed with each prompt once; transformers' log-probs at that temperature stand for an engine's."""
    tables, (batch,) = one_rank(certified)["fp32"]
    assert tables[SHARED]["tokens"] == len(PROMPTS) * SAMPLES * RESPONSE
    assert tables[SHARED]["largest"] < 1e-4
    assert tables["engine scored alone, trainer alone"]["largest"] < 1e-4, "at temperature 1"
    assert batch.shared_prefix.tolist() == [n if i else 0 for n in PROMPTS for i in range(SAMPLES)]
    assert batch.temperature.unique().tolist() == pytest.approx([TEMPERATURE])


@pytest.mark.slow
def test_a_certificate_shows_the_differences_that_a_shared_prompt_causes(one_rank):
    tables, _ = one_rank(certified)["bf16"]
    assert tables[WHOLE]["same_bits"] < 0.8  # 0.5 on CPUs without units for bf16
    assert tables[WHOLE]["largest"] > 1e-3
    assert tables["trainer: packed with others, alone"]["largest"] < tables[WHOLE]["largest"]
