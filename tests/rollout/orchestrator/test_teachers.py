"""Teachers over HTTP, scripted: what they list reaches the tokens, and every fault costs retries or a named error."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dppo_megatron.common.retry import RetryBudget
from dppo_megatron.config import Config, with_settings
from dppo_megatron.rollout.engines.protocol import (
    EngineError,
    EngineIncompatible,
    EngineRefused,
    EngineTimeout,
    InvalidSample,
)
from dppo_megatron.rollout.engines.secret import make_secret
from dppo_megatron.rollout.engines.teachers import teacher_config
from dppo_megatron.rollout.fleet.registry import register
from dppo_megatron.rollout.orchestrator import teachers as module
from dppo_megatron.rollout.orchestrator.teachers import Teachers
from dppo_megatron.run.checks import settings_problems
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import ENVIRONMENT, POLICY, Prompt, Rollout
from tests.support.actor_cases import QWEN3
from tests.support.configs import make_config
from tests.support.fakes.fleet import A, B, FakeServer
from tests.support.fakes.fleet import World as Fleet
from tests.support.fakes.orchestrator import STOP, World, sampling_config

VOCAB, K = 110, 5  # of the policy; the teacher's embedding has padding after them
PADDED = VOCAB + 2


def logprobs(tokens: list[int]) -> np.ndarray:
    """[S - 1, PADDED] fp32, of each token after the first by those before it."""
    rows = [np.random.default_rng(tokens[: i + 1]).normal(size=PADDED) for i in range(len(tokens) - 1)]
    x = np.array(rows).reshape(-1, PADDED) * 2
    return (x - np.log(np.exp(x).sum(1, keepdims=True))).astype(np.float32)


class Encoder:
    """One id per character."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) % VOCAB for c in text]


@dataclass
class Server:
    """Plays a stock server of either kind. `fault(n)` names what goes wrong with the n-th scoring request."""

    kind: str = "vllm"
    fault: Callable[[int], str] = lambda n: ""
    encode: Callable[[str], list[int]] = Encoder().encode
    most: int = 16  # its --max-logprobs
    asked: list[list[int]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)  # bearer tokens that it was sent
    url: str = ""
    running: int = 0

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        path = {"vllm": "/v1/completions", "sglang": "/generate"}[self.kind]
        app.add_routes([web.post(path, self._score), web.post("/tokenize", self._tokenize)])
        async with TestServer(app) as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield self

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self.encode((await request.json())["prompt"])})

    async def _score(self, request: web.Request) -> web.Response:
        body, fault = await request.json(), self.fault(len(self.asked))
        tokens, k = (body["prompt"], body["prompt_logprobs"]) if self.kind == "vllm" else (
            body["input_ids"], body["top_logprobs_num"])  # fmt: skip
        self.asked.append(tokens)
        self.tokens.append(request.headers.get("authorization", ""))
        if k > self.most:
            return web.json_response({"error": {"message": f"greater than max allowed: {self.most}"}}, status=400)
        if fault == "dies":
            request.transport.close()
        if fault == "slow":
            await asyncio.sleep(30)
        if fault == "fails":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        values = logprobs([t + (fault == "other tokens") for t in tokens])
        if fault == "nan":
            values[-1] = np.nan
        top = np.argsort(-values, axis=1)[:, : k - (fault == "short")]
        if self.kind == "sglang":
            own = [[None, tokens[0], None], *([float(v[t]), t, None] for v, t in zip(values, tokens[1:], strict=True))]
            lists = [None, *([[float(v[i]), int(i), None] for i in at] for v, at in zip(values, top, strict=True))]
            return web.json_response({"meta_info": {"input_token_logprobs": own, "input_top_logprobs": lists}})
        places: list[Any] = [None]
        for row, at, token in zip(values, top, tokens[1:], strict=True):
            listed = {token + (fault == "other tokens"): 99, **{int(i): rank for rank, i in enumerate(at, 1)}}
            places.append({str(i): {"logprob": float(row[i]), "rank": rank} for i, rank in listed.items()})
        return web.json_response({"choices": [{"index": 0, "prompt_logprobs": places}]})


def teaching(run_dir: Path, teachers: dict[str, dict], **settings: Any) -> Config:
    chosen = {"topk": K, "unavailable_timeout_s": 20, "request_timeout_s": 5, "teachers": teachers, **settings}
    return make_config(run={"dir": str(run_dir)}, distillation=chosen)


def prompt(source: str = "", position: int = 0) -> Prompt:
    return Prompt(position, 0, np.array([7, 8], np.int32), "12+34=", "46", {"prompt": "12+34="}, source)


def rollout(tokens: list[int], **more: Any) -> Rollout:
    n = int(more["spans"][more["spans"][:, 0] == POLICY, 1].sum()) if "spans" in more else len(tokens)
    return Rollout(np.array(tokens, np.int32), np.full(n, -1, np.float32), np.zeros(n, np.int32), "stop", **more)


def scored(config: Config, server: Server, asked: Prompt, rollouts: list[Rollout], before: Prompt | None = None):
    """The samples with their columns, and the metrics. `before` is scored first."""

    async def main():
        async with server.serving():
            chosen = {name: t.model_copy(update={"urls": (server.url,)} if t.urls else {})
                      for name, t in config.distillation.teachers.items()}  # fmt: skip
            here = config.model_copy(
                update={"distillation": config.distillation.model_copy(update={"teachers": chosen})}
            )
            for name in config.started_teachers:
                register(RunDir(teacher_config(here, name).run.dir), "engine-0", server.url, 1)
            teachers = Teachers(here, Encoder(), VOCAB, None)
            try:
                if before is not None:
                    await teachers.add(before, rollouts)
                return await teachers.add(asked, rollouts), teachers.take_metrics()
            finally:
                await teachers.close()

    return asyncio.run(main())


def test_the_client_of_a_server_that_moved_is_closed(tmp_path):
    """A restarted teacher has another port."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"max_position_embeddings": 10**6}))
    config = teaching(tmp_path / "run", {"a": {"path": str(tmp_path)}})
    here = RunDir(teacher_config(config, "a").run.dir)
    here.make()
    make_secret(teacher_config(config, "a"))

    async def main() -> set[tuple[str, str]]:
        teachers = Teachers(config, Encoder(), VOCAB, None)
        for number in (1, 2, 3):
            async with Server().serving() as server:
                register(here, "engine-0", server.url, number)
                await teachers.add(prompt(position=number), [rollout([1, 2])])
        clients = set(teachers._calls)
        await teachers.close()
        return clients - {("a", server.url)}

    assert asyncio.run(main()) == set()


URL = {"a": {"urls": ["http://placeholder"]}}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_lists_reach_the_tokens_that_the_policy_sampled(tmp_path, kind):
    """Also of several turns, with a sampling mask, twice the same, and of a trajectory without a turn."""
    spans = np.array([[POLICY, 2, 0], [ENVIRONMENT, 2, 0], [POLICY, 1, 1]], np.int32)
    everything = np.arange(VOCAB)
    mask = {
        "sampling_mask_ids": np.concatenate([[3, 9], everything]).astype(np.int32),
        "sampling_mask_counts": np.array([2, VOCAB], np.int32),
    }
    given = [rollout([2, 4, STOP]), rollout([5, 6, 80, 81, 7], spans=spans), rollout([2, 4, STOP])]
    given += [rollout([9, 3], **mask), replace(rollout([]), finish_reason="abort")]
    server = Server(kind)
    found, metrics = scored(teaching(tmp_path, {"a": {**URL["a"], "kind": kind}}), server, prompt(), given)
    assert sorted(server.asked) == [[7, 8, 2, 4, STOP], [7, 8, 5, 6, 80, 81, 7], [7, 8, 9, 3]]
    assert set(server.tokens) == {""}  # not the run's secret
    rows = {0: [1, 2, 3], 1: [1, 2, 5], 2: [1, 2, 3], 3: [1, 2], 4: []}
    gaps, tails = [], []
    for number, r in enumerate(found):
        exact = logprobs([7, 8, *r.token_ids.tolist()])[rows[number]]
        top = np.argsort(-exact, axis=1)[:, :K]
        own = r.token_ids if r.sampled is None else r.token_ids[r.sampled]
        assert (r.teacher_logprob == exact[np.arange(len(own)), own]).all()
        kept = top < VOCAB
        if number == 3:
            kept[0] &= np.isin(top[0], [3, 9])
        assert (r.teacher_ids == np.where(kept, top, -1)).all()
        assert (r.teacher_topk_logprob == np.take_along_axis(exact, top, 1)).all()
        assert (r.teacher_ids.dtype, r.teacher_logprob.dtype) == (np.int32, np.float32)
        gaps.append(-1 - r.teacher_logprob)
        tails.append(1 - np.exp(r.teacher_topk_logprob).sum(1))
    assert VOCAB in np.argsort(-logprobs([7, 8, 2, 4])[2])[:K]  # after 2 the first padded id is in the list
    assert (found[3].teacher_ids[0] == -1).any()
    assert metrics["teacher/a/kl"] == pytest.approx(float(np.concatenate(gaps).mean()), rel=1e-6)
    assert metrics["teacher/a/tail_mass"] == pytest.approx(float(np.concatenate(tails).mean()), rel=1e-5)
    assert metrics["teacher/retried_requests"] == 0


def test_rows_are_scored_by_the_teacher_of_their_source(tmp_path):
    """A started teacher gets its own secret; one with a template reads its own prompt."""
    teachers = {
        "sums": {"path": str(tmp_path), "sources": ["sums"]},
        "helped": {**URL["a"], "prompt_template": "{prompt}{answer} ", "secret_file": str(tmp_path / "key")},
    }
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"max_position_embeddings": 10**6}))
    (tmp_path / "key").write_text("k3y\n")
    config = teaching(tmp_path / "run", teachers)
    config.run.dir.mkdir()
    make_secret(config)
    own = teacher_config(config, "sums")
    assert own.engine.max_model_len == config.engine.max_model_len + 1
    RunDir(own.run.dir).make()
    make_secret(own)
    server = Server()
    found, _ = scored(config, server, prompt("sums"), [rollout([3])])
    assert server.asked == [[7, 8, 3]]
    assert server.tokens == [f"Bearer {(own.run.dir / 'secret').read_text().strip()}"]
    assert server.tokens != [f"Bearer {(config.run.dir / 'secret').read_text().strip()}"]
    server = Server()
    found, metrics = scored(config, server, prompt("other"), [rollout([3])])
    read = [*Encoder().encode("12+34=46 "), 3]
    assert server.asked == [read]
    assert server.tokens == ["Bearer k3y"]
    assert found[0].teacher_logprob == logprobs(read)[-1, 3]
    assert "teacher/helped/kl" in metrics
    assert "teacher/sums/kl" not in metrics
    alone = teaching(tmp_path, {"sums": teachers["sums"]})
    with pytest.raises(EngineIncompatible, match="none has rows of source 'other'"):
        scored(alone, Server(), prompt("other"), [rollout([3])])


@pytest.mark.parametrize("fault", ["dies", "slow", "fails", "other tokens", "nan", "short"])
def test_a_fault_costs_retries_and_no_group(tmp_path, fault, monkeypatch):
    """Two of three requests fail; the bank is that of an undisturbed run, and every token has its list."""
    config = teaching(tmp_path, URL, request_timeout_s=0.3 if fault == "slow" else 5)
    server = Server(fault=lambda n: fault if n % 3 else "")
    found, metrics = scored(config, server, prompt(), [rollout([9, i]) for i in range(4)])
    clean, _ = scored(config, Server(), prompt(), [rollout([9, i]) for i in range(4)])
    for ours, exact in zip(found, clean, strict=True):
        assert (ours.teacher_ids == exact.teacher_ids).all()
        assert (ours.teacher_logprob == exact.teacher_logprob).all()
    assert metrics["teacher/retried_requests"] == len(server.asked) - 4 > 0


def test_a_teacher_that_fails_is_reported_once_in_a_period_with_the_number_of_requests(tmp_path, monkeypatch, caplog):
    """Each request takes 10 s; four about each teacher fail. A warning is due at once and every 30 s."""
    server = Server(fault=lambda n: "" if n % 5 == 4 else "fails")
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 10.0 * len(server.asked)))
    config = teaching(tmp_path, {"a": {**URL["a"], "sources": ["sums"]}, "b": URL["a"]})
    _, metrics = scored(config, server, prompt(), [rollout([9])], before=prompt("sums"))
    assert metrics["teacher/retried_requests"] == 8
    warned = re.findall(r"teachers\.(\w): asked again, (\d+) requests .* out of memory", caplog.text)
    assert warned == [("a", "1"), ("a", "3"), ("b", "1"), ("b", "3")]


@pytest.mark.parametrize(
    ("server", "settings", "error", "words"),
    [
        (
            Server(encode=lambda text: [1, 2]),
            {},
            EngineIncompatible,
            "teachers.a: .* another tokenizer than model.path",
        ),
        (Server(most=3), {}, EngineRefused, "teachers.a: .*max allowed: 3.*distillation.topk = 5"),
        (Server(fault=lambda n: "nan"), {}, InvalidSample, "teachers.a: .*log-prob is missing or not finite"),
        (Server(fault=lambda n: "short"), {}, InvalidSample, r"teachers.a: .*cannot reshape"),
        (
            Server(fault=lambda n: "slow"),
            {"request_timeout_s": 0.2, "unavailable_timeout_s": 0.5},
            EngineTimeout,
            r"teachers.a: .*no answer within 0.2 s .*distillation.request_timeout_s.*resume",
        ),
    ],
    ids=["tokenizer", "K", "nan", "fewer", "silent"],
)
def test_a_lasting_fault_of_a_teacher_ends_the_run_and_names_the_teacher(
    tmp_path, monkeypatch, server, settings, error, words
):
    monkeypatch.setattr(module, "INVALID", RetryBudget(attempts=3))
    with pytest.raises(error, match=words):
        scored(teaching(tmp_path, URL, **settings), server, prompt(), [rollout([9, 4])])
    if error is InvalidSample:
        assert len(server.asked) == 3


def world(run_dir: Path, server: Server, **rollout_settings: Any) -> World:
    config = sampling_config(run_dir, steps=2, **rollout_settings)

    def teachers() -> Teachers:
        own = teaching(run_dir, {"a": {"urls": [server.url]}}, unavailable_timeout_s=1, request_timeout_s=1)
        return Teachers(config.model_copy(update={"distillation": own.distillation}), Encoder(), VOCAB, None)

    return World(config, teachers=teachers)


def run(w: World, server: Server, engine) -> None:
    async def main():
        async with server.serving():
            await w._run_attempt(engine, None)

    asyncio.run(main())


def test_a_run_that_loses_its_teacher_is_resumed_without_losing_a_group(tmp_path):
    quiet = Server()
    undisturbed = world(tmp_path / "one", quiet)
    run(undisturbed, quiet, undisturbed.engine())
    server = Server(fault=lambda n: "fails" if n > 13 else "")
    w = world(tmp_path / "two", server)
    with pytest.raises(EngineError, match=r"distillation.teachers.a: it does not score .*out of memory.*resume"):
        run(w, server, w.engine())
    assert 0 < len(w.groups()) < 8
    server.fault = lambda n: ""
    run(w, server, w.engine())
    assert w.steps() == undisturbed.steps()
    for group, same in zip(
        *(sorted(each.groups(), key=lambda g: g.prompt.position) for each in (w, undisturbed)), strict=True
    ):
        for ours, exact in zip(group.rollouts, same.rollouts, strict=True):
            assert (ours.token_ids == exact.token_ids).all()
            assert (ours.teacher_ids == exact.teacher_ids).all()
            assert (ours.teacher_topk_logprob == exact.teacher_topk_logprob).all()


def test_sampling_does_not_wait_for_the_teacher(tmp_path):
    """With room for one group at a time, all groups of the step are sampled while the teacher keeps silent."""
    server = Server(fault=lambda n: "slow")
    w = world(tmp_path, server, max_concurrent_groups=1)
    engine = w.engine()
    with pytest.raises(EngineTimeout):
        run(w, server, engine)
    assert (
        len({int(request.token_ids[0]) for request in engine.requests if request.request_id.startswith("group")}) == 4
    )
    assert engine.most_running == 1
    assert w.groups() == []


def test_settings_that_teach_nothing_are_named():
    def problems(teachers: dict, **sections: Any) -> str:
        return "\n".join(settings_problems(make_config(distillation={"teachers": teachers}, **sections)))

    url = URL["a"]
    assert problems({"a": url}) == ""
    assert problems({"a": url}, rollout={"group_size": 1}) == ""
    assert "rollout.temperature (0.7) to 1" in problems({"a": url}, rollout={"temperature": 0.7})
    assert "dynamic_sampling would drop" in problems({"a": url}, rollout={"dynamic_sampling": True})
    assert "samples nothing" in problems({"a": url}, rollout={"bank": "bank"})
    assert "several claim rows of source *" in problems({"a": url, "b": url})
    assert "several claim rows of source x" in problems(
        {"a": {**url, "sources": ["x"]}, "b": {**url, "sources": ["x"]}}
    )
    assert "a: set one of urls and path" in problems({"a": {**url, "path": "model"}})
    assert "must contain {prompt}" in problems({"a": {**url, "prompt_template": "x"}})
    assert "a: set one of urls and path" in problems({"a": {}})
    own = {"path": "model", "in_trainer": True}
    assert problems({"a": own}) == problems({"a": own}, rollout={"bank": "bank"}) == ""
    assert "a.in_trainer = true: excludes other teachers" in problems({"a": own, "b": {**url, "sources": ["x"]}})
    assert "a.in_trainer = true: excludes other teachers" in problems({"a": {**own, "tensor_parallel": 2}})
    assert "a.in_trainer = true: excludes other teachers" in problems({"a": own}, rollout={"top_p": 0.9})
    assert "a.in_trainer = true: excludes other teachers" in problems({"a": {**url, "in_trainer": True}})


async def test_a_policy_that_teaches_itself_is_scored_by_verified_engines_only(tmp_path):
    """Of two registered engines one has other bits; no teacher's route of a stock server is asked."""
    config = teaching(tmp_path, {"self": {"prompt_template": "{prompt}{answer} "}}, topk=1)
    config = with_settings(config, engine={"health_interval_s": 0.05, "unavailable_timeout_s": 5.0})
    RunDir(config.run.dir).make()
    engines = Fleet(config, {A: FakeServer(), B: FakeServer(misloads=True)})
    engines.publish(5, to=(A,))
    async with engines.live() as sampler:
        teachers = Teachers(config, Encoder(), VOCAB, sampler)
        for position in range(8):
            (taught,) = await teachers.add(prompt(position=position), [rollout([3, 4])])
            assert taught.teacher_logprob.tolist() == [-6, -6]
            assert taught.teacher_ids.tolist() == [[3], [4]]
            await asyncio.sleep(0.02)
        await teachers.close()

    read = Encoder().encode("12+34=46 ")
    assert [request.token_ids.tolist() for request in engines.servers[A].asked] == [[*read, 3, 4]] * 8
    assert engines.servers[B].asked == []
