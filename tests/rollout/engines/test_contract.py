"""The contract of `Engine`: samples, log-probs, top-K tokens and experts of every engine equal a reference's."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import EngineIncompatible, EngineRefused
from dppo_megatron.run.launch.evaluate import with_settings
from tests.support.engines import EOS, MAX_LOGPROBS, MAX_MODEL_LEN, PROMPT, VOCAB, group

TOLERANCE = 1e-4


def generate(request):
    return lambda engine: engine.generate(request)


async def some_steps(engine, sent):
    """Returns once `sent`, the task of a request, runs in the engine and has sampled several tokens, or is over."""
    while not sent.done() and not (await engine.info()).running:
        await asyncio.sleep(0.002)
    await engine.generate(group("pace", n=1, max_tokens=12))


def test_describes_itself_and_is_compatible(served):
    async def check(engine):
        await engine.health()
        return await engine.check_compatible(served.config, vocab_size=VOCAB)

    info = served.use(check)
    assert (info.version, info.vocab_size, info.max_model_len) == (0, VOCAB, MAX_MODEL_LEN)
    assert (info.max_logprobs, info.logprobs_mode, info.dtype) == (MAX_LOGPROBS, "processed_logprobs", "float32")
    assert info.engine.startswith(served.kind)
    assert info.problems == ()


def test_check_compatible_lists_every_disagreement(served):
    rollout = {"topk_logprobs": 20, "max_response_tokens": 257}
    other = with_settings(served.config, engine={"dtype": "bf16"}, rollout=rollout)
    with pytest.raises(EngineIncompatible) as error:
        served.use(lambda engine: engine.check_compatible(other, vocab_size=128))
    for part in ("topk_logprobs = 20", "max_response_tokens = 257", "runs in float32", "has 128"):
        assert part in str(error.value)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logprobs_and_topk_match_the_reference(served, temperature):
    rollouts = served.use(generate(group("reference", n=8, temperature=temperature, topk=5)))
    assert len(rollouts) == 8
    outside = 0
    for rollout in rollouts:
        expected = served.reference("a").logprobs(PROMPT, rollout.token_ids, temperature)
        rows = np.arange(len(rollout.token_ids))
        assert rollout.finish_reason == "length"
        assert rollout.token_ids.dtype == rollout.topk_ids.dtype == rollout.versions.dtype == np.int32
        assert rollout.rollout_logprob.dtype == rollout.rollout_topk_logprob.dtype == np.float32
        assert np.abs(rollout.rollout_logprob - expected[rows, rollout.token_ids]).max() < TOLERANCE
        assert (
            np.abs(rollout.rollout_topk_logprob - np.take_along_axis(expected, rollout.topk_ids, 1)).max() < TOLERANCE
        )
        assert np.abs(rollout.rollout_topk_logprob - -np.sort(-expected, 1)[:, :5]).max() < TOLERANCE
        assert (rollout.versions == 0).all()
        outside += int((rollout.topk_ids != rollout.token_ids[:, None]).all(1).sum())
    assert outside > 0, "no token outside the top-K was sampled: the test lost its point"


def test_a_seed_gives_the_same_tokens_among_other_requests(served):
    async def sample(engine):
        alone = await engine.generate(group("alone"))
        crowd = await asyncio.gather(
            *(engine.generate(group(f"crowd-{i}", n=7, first_seed=1000 * i, max_tokens=9 + i)) for i in range(6)),
            engine.generate(group("greedy", temperature=0.0)),
            engine.generate(group("again")),
        )
        return alone, crowd[-1], crowd[1]

    alone, again, other = served.use(sample)
    for first, second in zip(alone, again, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_allclose(first.rollout_logprob, second.rollout_logprob, atol=1e-5)
    assert len({tuple(r.token_ids[:9]) for r in (*alone, *other)}) == 11, "different seeds gave equal samples"


def test_top_p_leaves_the_most_likely_tokens_and_the_seeds_draw_among_them(served):
    request = replace(group("nucleus", n=16), top_p=0.5)
    first, again = (served.use(generate(request)) for _ in range(2))
    outside = 0
    for rollout, same in zip(first, again, strict=True):
        np.testing.assert_array_equal(rollout.token_ids, same.token_ids)
        p = np.exp(served.reference("a").logprobs(PROMPT, rollout.token_ids))
        sampled = p[np.arange(len(p)), rollout.token_ids]
        assert ((p * (p > sampled[:, None])).sum(1) < 0.5 + 1e-4).all()  # the likelier tokens sum to less than 0.5
        outside += int((p.argmax(1) != rollout.token_ids).sum())
    assert outside > 0, "only the likeliest token was ever sampled: the test lost its point"


def test_seeds_sample_the_distribution(served):
    """512 seeds draw each token about as often as its probability predicts (chi-squared of the frequent ones)."""
    rollouts = served.use(generate(group("seeds", n=512, first_seed=2**62, max_tokens=1)))
    counts = np.bincount([r.token_ids[0] for r in rollouts], minlength=VOCAB)
    expected = 512 * np.exp(served.reference("a").logprobs(PROMPT, np.zeros(1, np.int32))[0])
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    chi_squared = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert chi_squared < degrees + 4 * np.sqrt(2 * degrees)


def test_only_the_requested_tokens_stop(served):
    # The model directory names an end-of-sequence token; a request without it continues.
    unstopped = served.use(generate(group("unstopped", n=16, max_tokens=48)))
    assert any(EOS in r.token_ids[:-1] for r in unstopped)
    stopped = served.use(generate(group("stopped", n=16, max_tokens=48, stop=(EOS, 40))))
    assert "stop" in {r.finish_reason for r in stopped} <= {"stop", "length"}
    for before, after in zip(unstopped, stopped, strict=True):
        np.testing.assert_array_equal(before.token_ids[: len(after.token_ids)], after.token_ids)


def test_greedy(served):
    (rollout,) = served.use(generate(group("greedy", n=1, temperature=0.0)))
    expected = served.reference("a").logprobs(PROMPT, rollout.token_ids)
    np.testing.assert_array_equal(rollout.token_ids, expected.argmax(1))


def test_more_samples_than_run_at_once(served):
    """Each group is answered with its own samples, most of which waited for others to end."""

    async def crowd(engine):
        return await asyncio.gather(
            *(engine.generate(group(f"g{i}", n=8, first_seed=8 * i, max_tokens=16, topk=3)) for i in range(16))
        )

    for rollouts in served.use(crowd):
        expected = served.reference("a").logprobs(PROMPT, rollouts[0].token_ids)
        assert np.abs(rollouts[0].rollout_topk_logprob - -np.sort(-expected, 1)[:, :3]).max() < TOLERANCE
        assert len({tuple(r.token_ids) for r in rollouts}) == 8


def test_routed_experts_of_a_crowd_match_the_reference(mixture):
    def request(i: int):
        return group(f"g{i}", n=6, first_seed=6 * i, max_tokens=10 + 4 * i, topk=i, experts=i % 2 == 0)

    async def crowd(engine):
        return await asyncio.gather(*(engine.generate(request(i)) for i in range(8)))

    for i, rollouts in enumerate(mixture.use(crowd)):
        for rollout in rollouts:
            if i % 2:
                assert rollout.routed_experts is None
            else:
                expected = mixture.reference("a").experts(np.concatenate([PROMPT, rollout.token_ids]))[:-1]
                assert rollout.routed_experts.dtype == np.uint8
                assert rollout.routed_experts.shape == expected.shape
                np.testing.assert_array_equal(rollout.routed_experts, expected)


def test_an_aborted_request_returns_its_tokens_and_can_be_continued(served):
    experts = served.config.rollout.routing_replay

    async def abort_and_go_on(engine):
        await engine.abort("never-heard-of")
        for attempt in range(5):  # on a busy machine it may end by itself
            request = group("to-abort", n=3, first_seed=attempt, max_tokens=480, topk=4, experts=experts)
            running = asyncio.ensure_future(engine.generate(request))
            await some_steps(engine, running)
            await engine.abort("to-abort")
            if all(rollout.finish_reason == "abort" for rollout in await running):
                break
        partial = running.result()
        text = np.concatenate([PROMPT, partial[0].token_ids])
        (rest,) = await engine.generate(group("rest", n=1, prompt=text, max_tokens=8, experts=experts))
        return partial, rest

    partial, rest = served.use(abort_and_go_on)
    for rollout in partial:
        assert rollout.finish_reason == "abort"
        assert 0 < len(rollout.token_ids) < 480
        assert rollout.topk_ids.shape == rollout.rollout_topk_logprob.shape == (len(rollout.token_ids), 4)
        if experts:
            assert len(rollout.routed_experts) == len(PROMPT) + len(rollout.token_ids) - 1
    whole = np.concatenate([partial[0].token_ids, rest.token_ids])
    logprobs = np.concatenate([partial[0].rollout_logprob, rest.rollout_logprob])
    assert np.abs(logprobs - served.reference("a").sampled(whole)).max() < TOLERANCE


def test_another_client_may_use_the_ids_of_one_that_is_still_being_answered(served):
    async def two_clients(engine):
        first = asyncio.ensure_future(engine.generate(group("again", n=2, max_tokens=480)))
        await some_steps(engine, first)
        later = build_engine(served.config, engine.url)
        rollouts = await later.generate(group("again", n=2, max_tokens=2))
        await engine.abort("again")
        await later.close()
        return rollouts, await first

    assert [len(rollouts) for rollouts in served.use(two_clients)] == [2, 2]


def test_a_client_that_hangs_up_aborts_its_request(served):
    async def hang_up(engine):
        running = asyncio.ensure_future(engine.generate(group("left", n=2, max_tokens=480)))
        await some_steps(engine, running)
        with pytest.raises(EngineRefused, match="already running"):
            await engine.generate(group("left", n=2, max_tokens=2))
        running.cancel()
        while (await engine.info()).running:
            await asyncio.sleep(0.002)
        return await engine.generate(group("left", n=2, max_tokens=2))

    assert len(served.use(hang_up)) == 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (group("k", topk=MAX_LOGPROBS + 1), f"at most {MAX_LOGPROBS} log-probs"),
        (group("long", prompt=np.full(MAX_MODEL_LEN + 1, 5)), str(MAX_MODEL_LEN)),
        (group("foreign", prompt=np.array([5, VOCAB])), f"token id {VOCAB} is outside"),
    ],
)
def test_refused_requests_say_why(served, request_, message):
    with pytest.raises(EngineRefused, match=message):
        served.use(generate(request_))
    served.use(lambda engine: engine.health())


def test_experts_of_a_dense_model_are_refused(served):
    if served.config.rollout.routing_replay:
        pytest.skip("this model has experts")
    with pytest.raises(EngineRefused, match=r"routed.experts"):
        served.use(generate(group("experts", experts=True)))


def test_a_prompt_that_fills_the_model_ends_for_length(served):
    prompt = np.resize(PROMPT, MAX_MODEL_LEN - 2)
    rollouts = served.use(generate(group("full", n=2, prompt=prompt, max_tokens=24)))
    assert [(len(r.token_ids), r.finish_reason) for r in rollouts] == [(2, "length")] * 2


def test_a_server_of_another_kind_is_named(served):
    other = with_settings(served.config, engine={"kind": "sglang" if served.kind == "vllm" else "vllm"})
    with pytest.raises(EngineIncompatible, match=served.url):
        served.use(lambda engine: engine.info(), other)


def test_server_log_shows_no_failure(served):
    log = served.log.read_text()
    assert "ERROR" not in log
    assert "401 Client Error" not in log  # SGLang warms itself up through its own routes
    assert {"vllm": "Application startup complete", "sglang": "ready to roll"}[served.kind] in log
    assert "Traceback" not in log.partition("fired up and ready")[2]  # SGLang greets itself before it answers
