"""The vLLM client against a real server: what it samples, what it says of it, and how weights change under it."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
from tiny_engine import EOS, MAX_LOGPROBS, MAX_MODEL_LEN, VOCAB, Reference, engine_config, with_engine

from dppo_megatron.rollout.engine import (
    EngineIncompatible,
    EngineRefused,
    EngineTimeout,
    GenerateRequest,
)
from dppo_megatron.rollout.vllm_client import VllmEngine

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-4
PROMPT = np.array([5, 9, 33, 2, 17, 60, 8, 8, 41, 3], dtype=np.int32)
PROBE = np.array([7, 21, 21, 50, 4, 63, 12, 30, 9, 44, 18, 2], dtype=np.int32)


def group(name: str, *, n=4, first_seed=100, temperature=1.0, max_tokens=24, stop=(), topk=0, prompt=PROMPT):
    seeds = tuple(range(first_seed, first_seed + n))
    return GenerateRequest(name, prompt, n, seeds, temperature, max_tokens, stop, topk)


@pytest.fixture
def use(tiny_server):
    """Runs a coroutine on a client of the server, which serves policy 0 (model A) again afterwards."""
    config, url = tiny_server
    yield lambda function: with_engine(config, url, function)
    if with_engine(config, url, VllmEngine.version) != 0:
        with_engine(config, url, lambda engine: engine.load_weights(config.model.path, 0, "abort"))


@pytest.fixture(scope="module")
def reference_a(tiny_models):
    return Reference(tiny_models[0])


@pytest.fixture(scope="module")
def reference_b(tiny_models):
    return Reference(tiny_models[1])


def test_describes_itself_and_is_compatible(use, tiny_server):
    config, _ = tiny_server

    async def check(engine):
        await engine.health()
        return await engine.check_compatible(config, vocab_size=VOCAB)

    info = use(check)
    assert (info.version, info.vocab_size, info.max_model_len) == (0, VOCAB, MAX_MODEL_LEN)
    assert (info.max_logprobs, info.logprobs_mode, info.dtype) == (
        MAX_LOGPROBS,
        "processed_logprobs",
        "float32",
    )
    assert info.problems == ()


def test_check_compatible_lists_every_disagreement(use, tiny_server):
    config = tiny_server[0]
    other = config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"dtype": "bf16"}),
            "rollout": config.rollout.model_copy(update={"topk_logprobs": 20, "max_response_tokens": 600}),
        }
    )
    with pytest.raises(EngineIncompatible) as error:
        use(lambda engine: engine.check_compatible(other, vocab_size=128))
    for part in ("topk_logprobs = 20", "max_response_tokens = 600", "runs in float32", "has 128"):
        assert part in str(error.value)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_topk_match_the_reference(use, reference_a, temperature):
    request = group("reference", n=8, temperature=temperature, topk=5)
    rollouts = use(lambda engine: engine.generate(request))
    assert len(rollouts) == 8
    outside = 0
    for rollout in rollouts:
        expected = reference_a.logprobs(PROMPT, rollout.token_ids, temperature)
        rows = np.arange(len(rollout.token_ids))
        assert rollout.finish_reason == "length"
        assert rollout.token_ids.dtype == rollout.topk_ids.dtype == rollout.versions.dtype == np.int32
        assert rollout.logprobs.dtype == rollout.topk_logprobs.dtype == np.float32
        assert np.abs(rollout.logprobs - expected[rows, rollout.token_ids]).max() < TOLERANCE
        assert np.abs(rollout.topk_logprobs - np.take_along_axis(expected, rollout.topk_ids, 1)).max() < TOLERANCE
        assert np.abs(rollout.topk_logprobs - -np.sort(-expected, 1)[:, :5]).max() < TOLERANCE
        assert (rollout.versions == 0).all()
        outside += int((rollout.topk_ids != rollout.token_ids[:, None]).all(1).sum())
    assert outside > 0, "no token outside the top-K was sampled: the test lost its point"


def test_same_seed_same_tokens_alone_or_in_a_crowd(use):
    async def sample(engine):
        alone = await engine.generate(group("alone", n=4))
        crowd = await asyncio.gather(
            *(engine.generate(group(f"crowd-{i}", n=7, first_seed=1000 * i, max_tokens=9 + i)) for i in range(6)),
            engine.generate(group("again", n=4)),
        )
        return alone, crowd[-1], crowd[1]

    alone, again, other = use(sample)
    for first, second in zip(alone, again, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)
    assert len({tuple(r.token_ids[:9]) for r in (*alone, *other)}) == 11, "different seeds gave equal samples"


def test_only_the_requested_tokens_stop(use):
    # The model directory names an end-of-sequence token; a request without it goes on.
    unstopped = use(lambda engine: engine.generate(group("unstopped", n=16, max_tokens=48)))
    assert any(EOS in r.token_ids[:-1] for r in unstopped)
    stopped = use(lambda engine: engine.generate(group("stopped", n=16, max_tokens=48, stop=(EOS, 40))))
    assert {r.finish_reason for r in stopped} == {"stop", "length"}
    for before, after in zip(unstopped, stopped, strict=True):
        np.testing.assert_array_equal(before.token_ids[: len(after.token_ids)], after.token_ids)


def test_greedy(use, reference_a):
    (rollout,) = use(lambda engine: engine.generate(group("greedy", n=1, temperature=0.0)))
    expected = reference_a.logprobs(PROMPT, rollout.token_ids)
    np.testing.assert_array_equal(rollout.token_ids, expected.argmax(1))


def test_weights_change_there_and_back(use, tiny_models, reference_a, reference_b):
    a, b = tiny_models

    async def there_and_back(engine):
        scores, versions = [], []
        for path, version in ((a, 0), (b, 1), (a, 2)):
            await engine.load_weights(path, version)
            scores.append(await engine.score(PROBE))
            versions.append((await engine.version(), (await engine.generate(group("v", n=1)))[0].versions[0]))
        return scores, versions

    scores, versions = use(there_and_back)
    assert versions == [(0, 0), (1, 1), (2, 2)]
    for score, reference in zip(scores, (reference_a, reference_b, reference_a), strict=True):
        assert np.abs(score - reference.score(PROBE)).max() < TOLERANCE
    assert np.abs(scores[0] - scores[1]).max() > 0.1


def _without_config(directory):
    (directory / "config.json").unlink()


def _truncated(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _edited(change):
    def edit(directory):
        from safetensors.numpy import load_file, save_file

        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return edit


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "no such directory"),
        (_without_config, "no config.json"),
        (_truncated, "not a readable safetensors file"),
        (_edited(lambda t: t.pop(NORM)), f"missing tensors .{NORM}"),
        (_edited(lambda t: t.update(extra=t[NORM].copy())), "unknown tensors .extra"),
        (_edited(lambda t: t.update({NORM: t[NORM][:32].copy()})), f"{NORM} is .32,., served .64,."),
        (_edited(lambda t: t.update({NORM: t[NORM].astype(np.int64)})), "I64"),
    ],
    ids=["missing", "no-config", "truncated", "lacks-tensor", "unknown-tensor", "shape", "dtype"],
)
def test_bad_weights_leave_the_old_ones(use, tiny_models, tmp_path, reference_a, spoil, message):
    directory = shutil.copytree(tiny_models[1], tmp_path / "policy")
    spoil(directory)

    async def load(engine):
        with pytest.raises(EngineRefused, match=message) as error:
            await engine.load_weights(directory, 9)
        assert engine.url in str(error.value)
        return await engine.version(), await engine.score(PROBE)

    version, score = use(load)
    assert version == 0
    assert np.abs(score - reference_a.score(PROBE)).max() < TOLERANCE


async def _some_steps(engine):
    """Returns once the request that was just sent runs and has sampled several tokens."""
    while not (await engine.info()).running:
        await asyncio.sleep(0.002)
    await engine.generate(group("pace", n=1, max_tokens=12))


async def _update_while_generating(engine, request, models, version, mode, caught):
    """Samples of a request that began under model A and met an update to model B as policy `version`.

    Tried again while not `caught`: on a busy machine the request may end before the update begins.
    """
    for _ in range(5):
        await engine.load_weights(models[0], 0, "abort")
        running = asyncio.ensure_future(engine.generate(request))
        await _some_steps(engine)
        await engine.load_weights(models[1], version, mode)
        rollouts = await running
        if all(caught(rollout) for rollout in rollouts):
            return rollouts
    raise AssertionError("no update fell inside a request")


def test_update_in_flight_keeps_requests_and_tags_their_tokens(use, tiny_models, reference_a, reference_b):
    """Every token is drawn from exactly the policy it is tagged with, given the whole text before it."""
    request = group("kept", n=3, max_tokens=120)
    rollouts = use(
        lambda engine: _update_while_generating(
            engine, request, tiny_models, 7, "keep", caught=lambda r: r.versions[-1] == 7
        )
    )
    for rollout in rollouts:
        assert len(rollout.token_ids) == 120
        assert rollout.versions.tolist() == sorted(rollout.versions)
        assert set(rollout.versions) == {0, 7}
        rows = np.arange(120)
        for reference, version in ((reference_a, 0), (reference_b, 7)):
            expected = reference.logprobs(PROMPT, rollout.token_ids)[rows, rollout.token_ids]
            mine = rollout.versions == version
            assert np.abs(rollout.logprobs - expected)[mine].max() < TOLERANCE
            assert np.abs(rollout.logprobs - expected)[~mine].max() > 0.1


def test_update_that_aborts_returns_what_was_sampled(use, tiny_models, reference_a):
    request = group("cut", n=2, max_tokens=480)
    rollouts = use(
        lambda engine: _update_while_generating(
            engine, request, tiny_models, 8, "abort", caught=lambda r: r.finish_reason == "abort"
        )
    )
    for rollout in rollouts:
        assert rollout.finish_reason == "abort"
        assert 0 < len(rollout.token_ids) < 480
        assert (rollout.versions == 0).all()
        expected = reference_a.logprobs(PROMPT, rollout.token_ids)
        assert np.abs(rollout.logprobs - expected[np.arange(len(expected)), rollout.token_ids]).max() < TOLERANCE


def test_update_that_waits_lets_requests_finish_first(use, tiny_models):
    request = group("waited-for", n=2, max_tokens=60)
    rollouts = use(
        lambda engine: _update_while_generating(engine, request, tiny_models, 9, "wait", caught=lambda r: True)
    )
    assert all(len(r.token_ids) == 60 and (r.versions == 0).all() for r in rollouts)


def test_update_that_waits_in_vain_gives_up_and_keeps_serving(tiny_server, tiny_models, use):
    config, url = tiny_server
    hasty = config.model_copy(update={"weight_sync": config.weight_sync.model_copy(update={"timeout_s": 0.1})})

    async def update(engine):
        running = asyncio.ensure_future(engine.generate(group("long", n=1, max_tokens=400)))
        await _some_steps(engine)
        with pytest.raises(EngineTimeout, match="loading policy 9"):
            await engine.load_weights(tiny_models[1], 9, "wait")
        return await running, await engine.version()

    rollouts, version = with_engine(hasty, url, update)
    assert version == 0
    assert len(rollouts[0].token_ids) == 400


def test_abort_returns_what_was_sampled(use):
    async def abort(engine):
        await engine.abort("never-heard-of")
        for _ in range(5):  # on a busy machine it may end by itself
            running = asyncio.ensure_future(engine.generate(group("to-abort", n=3, max_tokens=480, topk=4)))
            await _some_steps(engine)
            await engine.abort("to-abort")
            if all(rollout.finish_reason == "abort" for rollout in await running):
                break
        return running.result()

    for rollout in use(abort):
        assert rollout.finish_reason == "abort"
        assert 0 < len(rollout.token_ids) < 480
        assert rollout.topk_ids.shape == rollout.topk_logprobs.shape == (len(rollout.token_ids), 4)


def test_a_client_that_hangs_up_aborts_its_request(use):
    async def hang_up(engine):
        running = asyncio.ensure_future(engine.generate(group("left", n=2, max_tokens=480)))
        await _some_steps(engine)
        with pytest.raises(EngineRefused, match="already running"):
            await engine.generate(group("left", n=2, max_tokens=2))
        running.cancel()
        while (await engine.info()).running:
            await asyncio.sleep(0.002)
        return await engine.generate(group("left", n=2, max_tokens=2))

    assert len(use(hang_up)) == 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (group("k", topk=MAX_LOGPROBS + 1), f"at most {MAX_LOGPROBS} log-probs"),
        (group("long", prompt=np.full(MAX_MODEL_LEN + 1, 5)), str(MAX_MODEL_LEN)),
        (group("foreign", prompt=np.array([5, VOCAB])), f"token id {VOCAB} is outside"),
    ],
)
def test_refused_requests_say_why(use, request_, message):
    with pytest.raises(EngineRefused, match=message):
        use(lambda engine: engine.generate(request_))


def test_a_prompt_that_fills_the_model_ends_for_length(use):
    prompt = np.resize(PROMPT, MAX_MODEL_LEN - 2)
    rollouts = use(lambda engine: engine.generate(group("full", n=2, prompt=prompt, max_tokens=24)))
    assert [(len(r.token_ids), r.finish_reason) for r in rollouts] == [(2, "length")] * 2


def test_a_server_without_the_extension_is_named(tiny_server):
    config, url = tiny_server
    with pytest.raises(EngineIncompatible, match="VLLM_PLUGINS"):
        with_engine(config, f"{url}/elsewhere", lambda engine: engine.info())


def test_server_log_shows_no_failure(use, tiny_server_log):
    assert "ERROR" not in tiny_server_log.read_text()


def test_config_helper_is_valid(tiny_models):
    assert engine_config(tiny_models[0]).engine.max_logprobs == MAX_LOGPROBS
