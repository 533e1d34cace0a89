"""The stock routes that teachers are asked by, and the scores of a policy that teaches itself, against the model."""

import asyncio
import json
import shutil
import time
from uuid import uuid4

import numpy as np
import psutil
import pytest

from dppo_megatron.config import with_settings
from dppo_megatron.config.distillation import DistillationConfig
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.rollout.engines.kinds import KINDS
from dppo_megatron.rollout.engines.protocol import EngineRefused, EngineTimeout, GenerateRequest
from dppo_megatron.rollout.engines.teachers import teacher_config
from dppo_megatron.rollout.fleet.registry import register
from dppo_megatron.rollout.orchestrator.teachers import Teachers
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import Prompt, Rollout
from tests.support.engines import MAX_LOGPROBS, VOCAB
from tests.support.faults import frozen

# The last id of the vocabulary, which SGLang does not name for the sequence itself, is among the tokens and the lists.
TOKENS = [5, *np.random.default_rng(0).integers(0, VOCAB, 198).tolist(), VOCAB - 1]


def asked(served, tokens: list[int], k: int) -> tuple[list, list]:
    kind = KINDS[served.kind]
    path, body = kind.lists_request(tokens, k)
    reply = served.use(lambda engine: engine._calls.call("lists", path, body=body))
    return kind.decode_lists(json.loads(reply), tokens, k)


def scored(tokens: list[int], k: int) -> GenerateRequest:
    return GenerateRequest(f"scored-{uuid4().hex}", np.array(tokens), 1, (0,), 1.0, 1, topk=k, scored=True)


@pytest.mark.parametrize("route", ["stock", "own"])
def test_lists_are_those_of_the_model(served, route):
    if route == "stock":
        logprobs, lists = asked(served, TOKENS, MAX_LOGPROBS)
    else:
        (found,) = served.use(lambda engine: engine.generate(scored(TOKENS, MAX_LOGPROBS)))
        version = served.use(lambda engine: engine.info()).version
        assert (found.token_ids.tolist(), set(found.versions.tolist())) == (TOKENS[1:], {version})
        logprobs, lists = found.rollout_logprob, np.stack([found.topk_ids, found.rollout_topk_logprob], 2)
    exact = served.reference("a").logprobs(np.array(TOKENS[:1]), np.array(TOKENS[1:]))
    rows = np.arange(len(TOKENS) - 1)
    np.testing.assert_allclose(logprobs, exact[rows, TOKENS[1:]], atol=1e-4)
    pairs = np.array(lists)
    ids, values = pairs[:, :, 0].astype(int), pairs[:, :, 1]
    assert pairs.shape == (len(TOKENS) - 1, MAX_LOGPROBS, 2)
    np.testing.assert_allclose(values, np.sort(exact, axis=1)[:, : -MAX_LOGPROBS - 1 : -1], atol=1e-4)
    np.testing.assert_allclose(values, exact[rows[:, None], ids], atol=1e-4)
    assert (ids == VOCAB - 1).any()


def test_a_list_beyond_the_limit_is_refused(served):
    if served.kind == "sglang":
        pytest.skip("SGLang has no limit of K")
    with pytest.raises(EngineRefused, match=f"max allowed: {MAX_LOGPROBS}"):
        asked(served, TOKENS, MAX_LOGPROBS + 1)


def test_scores_beyond_the_limit_are_refused(served):
    with pytest.raises(EngineRefused, match=f"at most {MAX_LOGPROBS} log-probs"):
        served.use(lambda engine: engine.generate(scored(TOKENS, MAX_LOGPROBS + 1)))


@pytest.mark.slow
def test_a_frozen_teacher_costs_requests_or_ends_the_run_by_name_in_the_time_of_its_settings(served, tmp_path):
    """The group is scored when the server wakes up. The launcher restarts a teacher that the run starts."""
    if served.kind != "vllm" or served.config.rollout.routing_replay:
        pytest.skip("nothing here depends on the kind of server")
    chosen = {"topk": 5, "request_timeout_s": 1, "unavailable_timeout_s": 4}
    chosen["teachers"] = {"t": {"path": str(served.models["a"])}}
    distillation = DistillationConfig.model_validate(chosen)
    config = with_settings(served.config, run={"dir": tmp_path}, distillation=distillation)
    teacher = RunDir(teacher_config(config, "t").run.dir)
    teacher.make()
    shutil.copy(RunDir(served.config.run.dir).secret, teacher.secret)
    tokens = np.array(TOKENS, np.int32)
    prompt = Prompt(0, 0, tokens[:1], "", "", {config.data.prompt_column: "?"})
    group = [Rollout(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")]
    port = served.url.rpartition(":")[2]
    (server,) = (child for child in psutil.Process().children() if port in child.cmdline())
    register(teacher, "engine-0", served.url, server.pid)

    async def ask():
        teachers = Teachers(config, load_tokenizer(served.models["a"], VOCAB), VOCAB, None)
        try:
            (before,) = await teachers.add(prompt, group)
            with frozen(server.pid):
                started = time.monotonic()
                with pytest.raises(EngineTimeout, match=r"teachers\.t: .*no answer within 1 s .*request_timeout_s"):
                    await teachers.add(prompt, group)
                assert time.monotonic() - started < 4 + 1 + 0.5  # both settings
                asked_again = teachers.take_metrics()["teacher/retried_requests"]
                waiting = asyncio.ensure_future(teachers.add(prompt, group))
                await asyncio.sleep(1.5)  # it is asked again
            (after,) = await waiting
            return before, after, asked_again, teachers.take_metrics()["teacher/retried_requests"]
        finally:
            await teachers.close()

    before, after, *asked_again = asyncio.run(ask())
    assert min(asked_again) >= 1
    for name in ("teacher_logprob", "teacher_topk_logprob"):
        np.testing.assert_allclose(after.column(name), before.column(name), atol=1e-5)
