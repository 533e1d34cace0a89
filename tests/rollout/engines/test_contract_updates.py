"""Every engine changes its weights there and back and under running requests, and rejects bad weights."""

import asyncio
import shutil

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import EngineError, EngineRefused, EngineTimeout
from dppo_megatron.run.launch.evaluate import with_settings
from tests.rollout.engines.test_contract import TOLERANCE, some_steps
from tests.support.engines import PROMPT, group

PROBE = np.array([7, 21, 21, 50, 4, 63, 12, 30, 9, 44, 18, 2], dtype=np.int32)


def test_weights_change_there_and_back(served, load):
    experts = served.config.rollout.routing_replay

    async def there_and_back(engine):
        seen = []
        for name, version in (("a", 0), ("b", 1), ("a", 2)):
            await load(engine, name, version)
            (rollout,) = await engine.generate(group("v", n=1, experts=experts))
            seen.append((name, (await engine.info()).version, await engine.score(PROBE), rollout))
        return seen

    scores = []
    for version, (name, reported, score, rollout) in enumerate(served.use(there_and_back)):
        reference = served.reference(name)
        assert reported == version
        assert (rollout.versions == version).all()
        assert score.dtype == np.float32
        assert np.abs(score - reference.score(PROBE)).max() < TOLERANCE
        assert np.abs(rollout.rollout_logprob - reference.sampled(rollout.token_ids)).max() < TOLERANCE
        if experts:
            text = np.concatenate([PROMPT, rollout.token_ids])
            np.testing.assert_array_equal(rollout.routed_experts, reference.experts(text)[:-1])
        scores.append(score)
    assert np.abs(scores[0] - scores[1]).max() > 0.1


async def update_while_generating(engine, load, request, version, mode, caught):
    """Samples of a request that began under model A and met an update to model B as policy `version`.

    Tried again while not `caught`: on a busy machine the request may end before the update begins.
    """
    for _ in range(5):
        await load(engine, "a", 0, "abort")
        running = asyncio.ensure_future(engine.generate(request))
        await some_steps(engine, running)
        await load(engine, "b", version, mode)
        rollouts = await running
        if all(caught(rollout) for rollout in rollouts):
            return rollouts
    raise AssertionError("no update fell inside a request")


def test_update_in_flight_keeps_requests_and_tags_their_tokens(served, load):
    """Every token is drawn from exactly the policy it is tagged with, given the whole text before it."""
    request = group("kept", n=3, max_tokens=200)
    rollouts = served.use(
        lambda engine: update_while_generating(
            engine, load, request, 7, "keep", caught=lambda r: set(r.versions) == {0, 7}
        )
    )
    for rollout in rollouts:
        assert len(rollout.token_ids) == 200
        assert rollout.versions.tolist() == sorted(rollout.versions)
        for name, version in (("a", 0), ("b", 7)):
            difference = np.abs(rollout.rollout_logprob - served.reference(name).sampled(rollout.token_ids))
            mine = rollout.versions == version
            assert difference[mine].max() < TOLERANCE
            assert difference[~mine].max() > 0.1


def test_an_update_that_aborts_a_request_returns_its_tokens(served, load):
    request = group("interrupted", n=2, max_tokens=480)
    rollouts = served.use(
        lambda engine: update_while_generating(
            engine, load, request, 8, "abort", caught=lambda r: r.finish_reason == "abort"
        )
    )
    for rollout in rollouts:
        assert rollout.finish_reason == "abort"
        assert 0 < len(rollout.token_ids) < 480
        assert (rollout.versions == 0).all()
        expected = served.reference("a").sampled(rollout.token_ids)
        assert np.abs(rollout.rollout_logprob - expected).max() < TOLERANCE


def test_update_that_waits_lets_requests_finish_first(served, load):
    request = group("waited-for", n=2, max_tokens=60)
    rollouts = served.use(
        lambda engine: update_while_generating(engine, load, request, 9, "wait", caught=lambda r: True)
    )
    assert all(len(r.token_ids) == 60 and (r.versions == 0).all() for r in rollouts)


@pytest.mark.slow
def test_update_that_waits_in_vain_gives_up_and_keeps_serving(served, load):
    hasty = with_settings(served.config, weight_sync={"timeout_s": 0.1})

    async def update(engine):
        running = asyncio.ensure_future(engine.generate(group("long", n=1, max_tokens=480)))
        await some_steps(engine, running)
        with pytest.raises(EngineTimeout, match="loading policy 9"):
            await load(engine, "b", 9, "wait")
        await engine.generate(group("later", n=1))
        return await running, (await engine.info()).version

    rollouts, version = served.use(update, hasty)
    assert version == 0
    assert len(rollouts[0].token_ids) == 480


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
    ("corrupt", "message", "refused"),
    [
        (shutil.rmtree, "no such directory", False),
        (_without_config, "no config.json", False),
        (_truncated, "not a readable safetensors file", False),
        (_edited(lambda t: t.pop(NORM)), f"missing tensors .{NORM}", True),
        (_edited(lambda t: t.update(extra=t[NORM].copy())), "unknown tensors .extra", True),
        (_edited(lambda t: t.update({NORM: t[NORM][:32].copy()})), f"{NORM} is .32,., served .64,.", True),
        (_edited(lambda t: t.update({NORM: t[NORM].astype(np.int64)})), "I64", True),
    ],
    ids=["missing", "no-config", "truncated", "lacks-tensor", "unknown-tensor", "shape", "dtype"],
)
def test_bad_weights_leave_the_old_ones(served, tmp_path, corrupt, message, refused):
    """A directory that cannot be read is not a refusal, which would end the run: storage may come back."""
    directory = shutil.copytree(served.models["b"], tmp_path / "policy")
    corrupt(directory)

    async def load(engine):
        with pytest.raises(EngineError, match=message) as error:
            await engine.load_weights(directory, 9)
        assert isinstance(error.value, EngineRefused) == refused
        assert engine.url in str(error.value)
        return (await engine.info()).version, await engine.score(PROBE)

    version, score = served.use(load)
    assert version == 0
    assert np.abs(score - served.reference("a").score(PROBE)).max() < TOLERANCE
