"""Drafts from earlier samples change no token and no log-prob, and planted faults of their verification are found."""

import itertools
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dppo_megatron.rollout.engines import drafts
from dppo_megatron.rollout.engines.drafts import MAX_TOKENS, DraftRate, SuffixIndex
from dppo_megatron.rollout.engines.vllm.extension.bodies import GenerateBody, parse
from dppo_megatron.rollout.engines.vllm.extension.wire import encode_request
from tests.support.engines import group

RUNNING = 4  # drafts are worth a quarter then


def index_of(*sequences, most=4):
    index = SuffixIndex()
    for sequence in sequences:
        index.add(sequence)
    return lambda *suffix: index.draft(np.array(suffix, np.int32), most, RUNNING)[0]


def test_the_longest_suffix_that_occurred_is_continued():
    draft = index_of([1, 5, 7, 2, 9, 9], [8, 3, 5, 7, 4, 6, 6])
    assert draft(1, 5, 7, 2) == [9, 9]  # four tokens
    assert draft(0, 0, 7, 4) == [6, 6]  # two tokens
    assert draft(0, 0, 0, 4) == []  # one is too few


def test_the_most_frequent_continuation_is_drafted_and_the_newest_of_equals():
    draft = index_of([5, 7, 2, 1], [5, 7, 2, 1], [5, 7, 3, 8], most=1)
    assert draft(5, 7) == [2]
    assert index_of([5, 7, 2, 1], [5, 7, 3, 8], most=1)(5, 7) == [3]


def test_a_draft_ends_where_the_sequence_ended_and_where_it_is_unlikely():
    assert index_of([5, 7, 2])(5, 7) == [2]
    assert index_of([5, 7], [5, 7])(5, 7) == []
    assert index_of(*([5, 7, token] for token in (1, 2, 3, 4)))(5, 7) == []  # each has a quarter
    long = list(range(40))
    assert len(index_of(long, most=30)(0, 1)) == 6  # 0.8 ** 6 > 1 / 4 > 0.8 ** 7


def test_more_running_samples_need_a_higher_probability():
    index, suffix = SuffixIndex(), np.array([0, 1], np.int32)
    index.add(list(range(40)))
    assert [len(index.draft(suffix, 30, running)[0]) for running in (1, 4, 8, 32, 64)] == [11, 6, 4, 1, 0]


def test_a_prompt_with_low_acceptance_gets_no_drafts_and_one_with_high_acceptance_longer_ones():
    good, bad = SuffixIndex(), SuffixIndex()
    suffix = np.array([0, 1], np.int32)
    for index, accepted in ((good, 5), (bad, 0)):
        index.add(list(range(40)))
        assert index.draft(suffix, 30, RUNNING)[0]
        for _ in range(40):
            index.tested([1.0] * 5, accepted)
    assert len(good.draft(suffix, 30, RUNNING)[0]) > 20
    assert bad.draft(suffix, 30, RUNNING)[0] == []


def test_a_new_prompt_begins_with_the_acceptance_of_all():
    overall = DraftRate()
    first, second = SuffixIndex(overall), SuffixIndex(overall)
    suffix = np.array([0, 1], np.int32)
    for index in (first, second):
        index.add(list(range(40)))
    assert first.draft(suffix, 30, RUNNING)[0]
    for _ in range(200):
        first.tested([1.0], 0)
    assert len(second.draft(suffix, 30, RUNNING)[0]) == 1  # it is tried once more


def test_the_memory_of_a_prompt_is_bounded_and_the_oldest_sequences_go():
    index, half = SuffixIndex(), MAX_TOKENS // 2
    for first in range(3):
        index.add(np.arange(half) + 10**6 * first)
        index.draft(np.array([1], np.int32), 1, RUNNING)
    assert sum(map(len, index._sequences)) == MAX_TOKENS
    assert len(index._tokens) <= 2 * MAX_TOKENS + 4
    assert index.draft(np.array([7, 8], np.int32), 1, RUNNING)[0] == []
    assert index.draft(np.array([10**6 + 7, 10**6 + 8], np.int32), 1, RUNNING)[0] == [10**6 + 9]
    index.shrink()
    assert not index._places
    assert index.draft(np.array([10**6 + 7, 10**6 + 8], np.int32), 1, RUNNING)[0] == [10**6 + 9]


def test_many_short_sequences_take_no_time():
    index, before = SuffixIndex(), time.process_time()
    for _ in range(20_000):
        index.add([])
        index.add([1, 2])
    assert time.process_time() - before < 5  # 0.3 s; with a sum over all sequences minutes


def test_an_index_that_dropped_sequences_drafts_as_a_new_one_and_is_not_rebuilt(monkeypatch):
    monkeypatch.setattr(drafts, "MAX_TOKENS", 100)
    generator, index, added, built = np.random.default_rng(3), SuffixIndex(), 0, 0
    for _ in range(60):
        index.add(sequence := generator.integers(0, 3, generator.integers(3, 60)))
        added, before = added + len(sequence), len(index._tokens)
        suffix = generator.integers(0, 3, 16).astype(np.int32)
        shown = index.draft(suffix, 8, RUNNING)
        built += max(len(index._tokens) - before, len(index._tokens) if len(index._tokens) < before else 0)
        new = SuffixIndex()
        for sequence in index._sequences:
            new.add(sequence)
        new._rate = replace(index._rate) if index._rate else None
        assert shown == new.draft(suffix, 8, RUNNING)
    assert built < 2.5 * added


VOCAB, K = 40, 3
TEMPERATURES = (1.0, 0.7, 1.5, 0.0)


def logits_of(tokens):
    """The model: logits that follow from the last three tokens and their number."""
    return np.random.default_rng([len(tokens), *tokens[-3:]]).normal(0, 2, VOCAB).astype(np.float32)


class Decoding:
    """Decodes requests with vLLM's own sampler, as its model runner does; `draft` guesses the next tokens of each."""

    def __init__(self, lengths, foreign=False):
        import torch
        from vllm.platforms import current_platform
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.sampler import Sampler

        from dppo_megatron.rollout.engines.vllm.extension.drafts import GIVEN, BankDrafts

        current_platform.import_kernels()
        self.torch, n = torch, len(lengths)
        temperature = torch.tensor((TEMPERATURES * n)[:n])
        generators = {i: torch.Generator().manual_seed(100 + i) for i in range(n) if temperature[i]}
        none = torch.zeros(n)
        metadata = SamplingMetadata(
            temperature, False, False, None, None, generators, K, True, None, none, none, none, [], None, {},
            LogitsProcessors(),
        )  # fmt: skip
        given = [{GIVEN: []}] * n
        if foreign:
            given[0] = {}
        self.names = [f"group/{i}-0" for i in range(n)]
        requests = {
            name: SimpleNamespace(
                sampling_params=SimpleNamespace(extra_args=extra, max_tokens=99),
                prompt_token_ids=[1],
                output_token_ids=[],
            )
            for name, extra in zip(self.names, given, strict=True)
        }
        batch = SimpleNamespace(req_ids=self.names, sampling_metadata=metadata)
        self.runner = SimpleNamespace(
            input_batch=batch,
            requests=requests,
            sampler=Sampler("processed_logprobs"),
            _sample=self.plain,
            device=torch.device("cpu"),
        )
        self.runner.device = torch.device("cpu")
        config = SimpleNamespace(
            num_speculative_tokens=8,
            additional_config={"dppo_draft_batch": 8},
            model_config=SimpleNamespace(max_model_len=999),
        )
        self.drafts = BankDrafts(config)
        self.drafts.attach(self.runner)
        self.drafts.propose([[]] * n, np.zeros(n, int), np.zeros((n, 1), np.int32))
        self.lengths = lengths
        self.tokens = [[i] for i in range(n)]
        self.logprobs = [[] for _ in range(n)]
        self.steps = 0

    def plain(self, logits, drafted):
        assert drafted is None
        return self.runner.sampler(logits=logits, sampling_metadata=self.runner.input_batch.sampling_metadata)

    def run(self, draft):
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        torch = self.torch
        while any(len(t) - 1 < n for t, n in zip(self.tokens, self.lengths, strict=True)):
            drafts = [draft(i, tokens) for i, tokens in enumerate(self.tokens)]
            rows = [
                logits_of([*tokens, *own[:j]])
                for tokens, own in zip(self.tokens, drafts, strict=True)
                for j in range(len(own) + 1)
            ]
            drafted = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu")) if any(drafts) else None
            out = self.runner._sample(torch.from_numpy(np.stack(rows)), drafted)
            new, found = RejectionSampler.parse_output(out.sampled_token_ids, VOCAB, (), out.logprobs_tensors)
            for i, tokens in enumerate(new):
                place = found.cu_num_generated_tokens[i]
                self.tokens[i] += tokens
                self.logprobs[i] += [
                    (*found.logprob_token_ids[place + j].tolist(), *found.logprobs[place + j].tolist())
                    for j in range(len(tokens))
                ]
            self.steps += 1
        ends = [slice(0, n) for n in self.lengths]
        tokens = [own[1:][end] for own, end in zip(self.tokens, ends, strict=True)]
        return tokens, [own[end] for own, end in zip(self.logprobs, ends, strict=True)]


LENGTHS = (30, 24, 18, 30, 26)


@pytest.fixture(scope="module")
def without():
    pytest.importorskip("vllm", reason="needs vLLM")
    return Decoding(LENGTHS).run(lambda i, tokens: [])


def guesses(found, wrong_every=4):
    """Drafts of the true tokens, of which one in `wrong_every` is replaced; of other lengths in every step."""
    sizes = itertools.cycle((3, 0, 5, 1, 8, 2, 4))

    def draft(i, tokens):
        done, size = len(tokens) - 1, next(sizes)
        true = found[0][i][done : done + size]
        return [(token + 1) % VOCAB if (done + j) % wrong_every == 3 else token for j, token in enumerate(true)]

    return draft


@pytest.mark.slow
@pytest.mark.parametrize("wrong_every", [1000, 4, 1])
def test_tokens_and_log_probs_are_those_without_drafts(without, wrong_every):
    decoding = Decoding(LENGTHS)
    assert decoding.run(guesses(without, wrong_every)) == without
    assert decoding.steps < max(LENGTHS) or wrong_every == 1


@pytest.mark.slow
def test_in_a_batch_with_a_request_of_another_route_no_draft_is_accepted(without):
    decoding = Decoding(LENGTHS, foreign=True)
    assert decoding.run(guesses(without, 1000)) == without
    assert decoding.steps == max(LENGTHS)


def keyed_by_step(drafts, monkeypatch):
    """Noise of the step instead of the position: a rejected draft consumes its draw."""
    monkeypatch.setattr(drafts, "_set_back", lambda *_: None)
    monkeypatch.setattr(drafts, "_check_draws", lambda *_: None)


def accepted_unsampled(drafts, monkeypatch):
    rows = drafts._accepted
    monkeypatch.setattr(
        drafts, "_accepted", lambda found, kept, starts, width: rows(found, kept * 0 + 2, starts, width)
    )


def log_prob_of_the_next_row(drafts, monkeypatch):
    rows = drafts._accepted

    def wrong(found, kept, starts, width):
        right = rows(found, kept, starts, width)
        return drafts.replace(right, logprobs_tensors=rows(found, kept, starts + 1, width).logprobs_tensors)

    monkeypatch.setattr(drafts, "_accepted", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [keyed_by_step, accepted_unsampled, log_prob_of_the_next_row])
def test_a_fault_is_found(without, fault, monkeypatch):
    from dppo_megatron.rollout.engines.vllm.extension import drafts

    fault(drafts, monkeypatch)
    assert Decoding(LENGTHS).run(guesses(without)) != without


@pytest.mark.slow
def test_a_sampler_that_draws_otherwise_ends_the_engine(without):
    decoding = Decoding(LENGTHS)
    decoding.runner.sampler.topk_topp_sampler.use_fp64_gumbel = True
    with pytest.raises(RuntimeError, match=r"draw once per token; set engine.draft_tokens to 0"):
        decoding.run(guesses(without))


SETTINGS = {
    "device_config": {"device_type": "cpu"},
    "scheduler_config": {"enable_chunked_prefill": False},
    "parallel_config": {"data_parallel_size": 1},
    "model_config": {"runner_type": "generate"},
}
OURS = "dppo_megatron.rollout.engines.vllm.extension.drafts.BankDrafts"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (None, None),
        ({"model": OURS}, None),
        ({"model": OURS, "rejection_sample_method": "synthetic"}, "rejection_sample_method = synthetic"),
        ({"model": "eagle", "method": "eagle3"}, r"\(eagle3\) draws other tokens for a seed"),
    ],
)
def test_speculative_settings_of_a_server_are_checked(settings, problem):
    pytest.importorskip("vllm", reason="needs vLLM")
    from dppo_megatron.rollout.engines.vllm.extension.routes import _unfit_settings

    config = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in SETTINGS.items()})
    method = {"rejection_sample_method": "standard", "method": "custom_class"}
    config.speculative_config = None if settings is None else SimpleNamespace(**method | settings)
    assert [bool(re.search(problem, found)) for found in _unfit_settings(config)] == [True] * (problem is not None)
    if settings == {"model": OURS}:
        config.device_config.device_type = "cuda"
        assert "have not been run on GPUs" in "".join(_unfit_settings(config))


def test_drafts_reach_the_server_and_the_names_of_conversations_do_not():
    request = replace(group("d"), drafts=(np.array([5, 7]), np.array([9])), affinity=("g", "g.1"))
    body = encode_request(request)
    sent = parse(GenerateBody, body).request()
    assert [tokens.tolist() for tokens in sent.drafts] == [[5, 7], [9]]
    assert {tokens.dtype for tokens in sent.drafts} == {np.dtype(np.int32)}
    assert b"affinity" not in body
    with_foreign = replace(request, drafts=(np.array([5, 100, 7]), np.array([-1, 5]), np.array([99, 0])))
    known = parse(GenerateBody, encode_request(with_foreign)).request().within(100)
    assert [tokens.tolist() for tokens in known.drafts] == [[5], [], [99, 0]]
    with pytest.raises(ValueError, match="token id 5 is outside the vocabulary of 5"):
        replace(request, token_ids=np.array([4, 5])).within(5)
    assert b"drafts" not in encode_request(group("d"))  # servers of earlier versions do not know them
