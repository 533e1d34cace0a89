"""A vLLM server with `engine.draft_tokens` and `engine.exact` returns the bits of samples without drafts."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import EngineRefused
from tests.support.engines import MAX_MODEL_LEN, PROMPT, engine_config, group, running_server, with_engine

pytestmark = pytest.mark.engines

SIZE = 60


@pytest.fixture(scope="module")
def drafting(tiny_models, tmp_path_factory):
    config = engine_config(tiny_models("dense")["a"], draft_tokens=6, exact=True)
    with running_server(config, tmp_path_factory.mktemp("drafts") / "server.log", version=0) as url:
        yield lambda use: with_engine(config, url, use)


def with_drafts(request, alone, wrong_every=None, wrong=11):
    """The request with drafts of the true tokens, of which some are replaced."""
    drafts = []
    for rollout in alone:
        tokens = rollout.token_ids.copy()
        if wrong_every:
            tokens[3::wrong_every] = wrong
        drafts.append(np.concatenate([request.token_ids, tokens]))
    return replace(request, drafts=tuple(drafts))


async def one_by_one(engine, request):
    """The samples of `request` without drafts: a request alone has no siblings either."""
    ones = [replace(request, request_id=f"{request.request_id}-{s}", n=1, seeds=(s,)) for s in request.seeds]
    return [rollout for one in ones for rollout in await engine.generate(one)]


def assert_same_bits(found, expected):
    for rollout, alone in zip(found, expected, strict=True):
        assert rollout.finish_reason == alone.finish_reason
        np.testing.assert_array_equal(rollout.token_ids, alone.token_ids)
        for name, column in alone.columns.items():
            np.testing.assert_array_equal(rollout.columns[name], column, err_msg=name)


@pytest.mark.parametrize(("temperature", "stop"), [(1.0, ()), (0.7, (40, 12)), (1.5, ()), (0.0, ())])
def test_drafts_change_no_bit(drafting, temperature, stop):
    request = group("d", n=4, max_tokens=SIZE, topk=5, temperature=temperature, stop=stop)

    async def use(engine):
        alone = await one_by_one(engine, request)
        assert engine.counts["drafted"] == 0
        engine.counts.clear()
        for name, *wrong in (("right",), ("some", 7), ("wrong", 1), ("foreign", 7, 10**6)):
            drafted = with_drafts(replace(request, request_id=name), alone, *wrong)
            assert_same_bits(await engine.generate(drafted), alone)
            counts = engine.counts.copy()
            engine.counts.clear()
            assert counts["sampled_tokens"] == sum(len(r.token_ids) for r in alone)
            if name == "right":
                assert counts["accepted"] > 0.6 * counts["sampled_tokens"]
        siblings = await engine.generate(replace(request, request_id="siblings", max_tokens=30))
        assert_same_bits(siblings, await one_by_one(engine, replace(request, max_tokens=30)))

    drafting(use)


def test_a_crowd_above_the_batch_size_and_a_model_that_is_full(drafting):
    full = np.resize(PROMPT, MAX_MODEL_LEN - 20)
    requests = [
        group(f"c{i}", n=3, first_seed=10 * i, max_tokens=30 - i, prompt=full if i == 1 else PROMPT) for i in range(4)
    ]

    async def use(engine):
        alone = [await one_by_one(engine, request) for request in requests]
        crowd = [
            with_drafts(replace(r, request_id=f"{r.request_id}+"), a) for r, a in zip(requests, alone, strict=True)
        ]
        for found, expected in zip(await asyncio.gather(*map(engine.generate, crowd)), alone, strict=True):
            assert_same_bits(found, expected)

    drafting(use)


def test_updates_in_flight_and_interrupted_samples(drafting, tiny_models):
    request = group("u", n=2, max_tokens=300, topk=3)

    async def use(engine):
        alone = await one_by_one(engine, request)
        running = asyncio.ensure_future(engine.generate(with_drafts(replace(request, request_id="kept"), alone, 9)))
        await engine.load_weights(tiny_models("dense")["a"], 1)
        kept = await running
        for rollout, expected in zip(kept, alone, strict=True):  # the same weights under another number
            np.testing.assert_array_equal(rollout.token_ids, expected.token_ids)
            np.testing.assert_array_equal(rollout.rollout_logprob, expected.rollout_logprob)
        for attempt in range(5):
            name = f"abort-{attempt}"
            running = asyncio.ensure_future(engine.generate(with_drafts(replace(request, request_id=name), alone, 9)))
            await asyncio.sleep(0.05 / (attempt + 1))
            await engine.abort(name)
            ended = await running
            if all(rollout.finish_reason == "abort" for rollout in ended):
                break
        for rollout, expected in zip(ended, alone, strict=True):
            size = len(rollout.token_ids)
            np.testing.assert_array_equal(rollout.token_ids, expected.token_ids[:size])
            np.testing.assert_array_equal(rollout.rollout_logprob, expected.rollout_logprob[:size])
            if size:
                rest = replace(request, request_id=f"rest-{size}", n=1, seeds=(9,), max_tokens=20)
                rest = replace(rest, token_ids=np.concatenate([PROMPT, rollout.token_ids]))
                (plain,) = await engine.generate(rest)
                drafted = with_drafts(replace(rest, request_id=f"more-{size}"), [plain])
                assert_same_bits(await engine.generate(drafted), [plain])
        await engine.load_weights(tiny_models("dense")["a"], 0)

    drafting(use)


def test_masks_are_refused(drafting):
    with pytest.raises(EngineRefused, match="sampling_mask = true"):
        drafting(lambda engine: engine.generate(group("m", top_k=5, sampling_mask=True)))
