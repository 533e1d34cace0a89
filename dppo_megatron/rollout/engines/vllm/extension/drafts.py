"""Draft tokens from earlier samples of a prompt in a vLLM worker, and verify them without changing any token.

vLLM's verification draws as often as there are drafts, so with other drafts a seed gives other tokens. Here every
drafted position is sampled from the target, with the draw that a run without drafts uses at this position. A draft is
accepted if it equals the sampled token.

Without drafts vLLM 0.32 draws once per token (on CPUs), from a generator for each request. So token i uses draw i of
the generator. All rows of a request share the generator and draw in order. Afterwards the generator is set back to the
draws for the tokens that were kept.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import SamplerOutput

from dppo_megatron.rollout.engines.drafts import SUFFIXES, DraftRate, SuffixIndex

from .experts import name_of

GIVEN = "dppo_drafts"
"""Key in a request's `extra_args`: sequences to draft from, as int32 bytes; empty if another request has them."""
BATCH = "dppo_draft_batch"
"""Key in vLLM's additional config: the worker drafts while at most this many sequences run."""
MAX_GROUPS = 512  # sequences are kept for this many groups; the oldest group is dropped first


def has_drafts(config: VllmConfig) -> bool:
    """Return whether the server was started with `BankDrafts`."""
    speculative = config.speculative_config
    return speculative is not None and speculative.model == f"{__name__}.{BankDrafts.__name__}"


class _Running(NamedTuple):
    """Describes a running request: the group, the prompt, and the response so far."""

    group: str
    prompt: Sequence[int]
    response: list[int]


class BankDrafts:
    """Proposes and verifies drafts. vLLM creates it by name, and `attach` connects it with the model runner (V1).

    Drafts follow the sequences that a request brings and the finished samples of the group. Request ids GROUP/SAMPLE
    name the groups. A request without `GIVEN` is sampled without drafts.
    """

    def __init__(self, config: VllmConfig):
        self._draft_limit = config.num_speculative_tokens
        additional_config: Any = config.additional_config
        self._batch = int(additional_config.get(BATCH, 0))
        self._longest = config.model_config.max_model_len
        self._runner: Any = None
        self._running: dict[str, _Running] = {}  # request id -> request
        self._groups: OrderedDict[str, SuffixIndex] = OrderedDict()
        self._acceptance = DraftRate()
        self._checked = False  # whether the sampler's draws were compared with ours
        self._shares: dict[str, list[float]] = {}  # request id -> shares of the latest draft

    def load_model(self, *_: Any) -> None:
        """Do nothing: there is no draft model."""

    def attach(self, runner: Any) -> None:
        """Start proposing and verifying drafts for `runner`, which has this proposer. Raises RuntimeError on GPUs."""
        if runner.device.type != "cpu":
            raise RuntimeError("drafts have not been run on GPUs; set engine.draft_tokens to 0")
        self._runner = runner
        runner._sample = partial(self._sample, runner._sample)
        # vLLM proposes zeros near the maximum model length; `propose` limits the drafts itself.
        runner.effective_drafter_max_model_len = sys.maxsize

    def propose(
        self, sampled: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return the drafts for each request in the batch.

        sampled: the new tokens of each request.
        num_tokens: [B], number of tokens in each request.
        token_ids: [B, L] int32, the tokens of each request.
        """
        drafts: list[list[int]] = [[] for _ in sampled]
        if self._runner is None:
            return drafts
        self._follow()
        self._shares.clear()
        if len(sampled) > self._batch:
            return drafts
        for row, (request_id, new) in enumerate(zip(self._runner.input_batch.req_ids, sampled, strict=True)):
            running = self._running.get(request_id)
            if running is None or not new or (index := self._groups.get(running.group)) is None:
                continue
            # A step samples one token more than there are drafts.
            left = self._runner.requests[request_id].sampling_params.max_tokens - len(running.response)
            end = int(num_tokens[row])
            max_drafts = min(self._draft_limit, left - 1, self._longest - end - 1)
            if max_drafts > 0:
                suffix = token_ids[row, max(0, end - max(SUFFIXES)) : end]
                drafts[row], shares = index.draft(suffix, max_drafts, len(sampled))
                self._shares[request_id] = shares
        return drafts

    def _follow(self) -> None:
        """Register new requests, and add the samples of finished requests to their groups."""
        requests = self._runner.requests
        for request_id in self._runner.input_batch.req_ids:
            if request_id in self._running:
                continue
            state = requests[request_id]
            if (sequences := (state.sampling_params.extra_args or {}).get(GIVEN)) is not None:
                group = name_of(request_id).rpartition("/")[0]
                self._running[request_id] = _Running(group, state.prompt_token_ids, state.output_token_ids)
                index = self._groups.setdefault(group, SuffixIndex(self._acceptance))
                for sequence in sequences:
                    index.add(np.frombuffer(sequence, np.int32))
        for request_id in self._running.keys() - requests.keys():
            group, prompt, response = self._running.pop(request_id)
            finished = self._groups.get(group)
            if finished is not None:
                finished.add([*prompt[-max(SUFFIXES) :], *response])
                if not any(running.group == group for running in self._running.values()):
                    finished.shrink()
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def _sample(self, sample: Callable[..., SamplerOutput], logits: Any, drafted: Any) -> SamplerOutput:
        """Sample every row from the target, and keep each request's tokens up to the first that differs from the draft.

        logits: [rows, V]. d drafted tokens of a request have d + 1 rows: a row before them, and a row after each.
        """
        if drafted is None or not drafted.max_spec_len:
            return sample(logits, None)
        self._follow()
        batch, counts = self._runner.input_batch, np.array(drafted.num_draft_tokens) + 1
        metadata, starts = batch.sampling_metadata, np.cumsum(counts) - counts
        if any(request_id not in self._running for request_id in batch.req_ids):
            # Settings of other requests, such as penalties, may depend on the row. The first rows are exact for all.
            output = self._runner.sampler(logits=logits[torch.from_numpy(starts)], sampling_metadata=metadata)
            return _accepted(output, np.ones_like(counts), np.arange(len(counts)), drafted.max_spec_len + 1)
        states = {row: g.get_state() for row, g in metadata.generators.items() if counts[row] > 1}
        output = self._runner.sampler(logits=logits, sampling_metadata=_for_rows(metadata, counts))
        tokens, drafts = output.sampled_token_ids[:, 0].tolist(), drafted.draft_token_ids.tolist()
        kept_counts = np.ones_like(counts)
        for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            draft = drafts[start - row : start - row + count - 1]
            accepted = next((i for i, token in enumerate(draft) if token != tokens[start + i]), len(draft))
            kept_counts[row] = accepted + 1
            name = batch.req_ids[row]
            shares = self._shares.get(name) if draft else None
            if shares and (index := self._groups.get(self._running[name].group)) is not None:
                index.tested(shares[: len(draft)], accepted)
        for row, state in states.items():
            if not self._checked:
                _check_draws(metadata.generators[row], state, int(counts[row]))
                self._checked = True
            if kept_counts[row] < counts[row]:
                _set_back(metadata.generators[row], state, int(kept_counts[row]))
        return _accepted(output, kept_counts, starts, drafted.max_spec_len + 1)


def _for_rows(metadata: Any, counts: np.ndarray) -> Any:
    """Repeat the sampling metadata of each request for each of the request's rows. These rows share a generator."""
    requests = np.repeat(np.arange(len(counts)), counts)
    index = torch.from_numpy(requests)
    tensors = {name: getattr(metadata, name) for name in ("temperature", "top_p", "top_k")}
    return replace(
        metadata,
        **{name: None if tensor is None else tensor[index] for name, tensor in tensors.items()},
        generators={row: metadata.generators[r] for row, r in enumerate(requests.tolist()) if r in metadata.generators},
    )


def _accepted(output: SamplerOutput, kept_counts: np.ndarray, starts: np.ndarray, width: int) -> SamplerOutput:
    """Return each request's first `kept_counts` tokens, from the rows at `starts`, as vLLM's rejection sampler does.

    Tokens are [B, width], padded with -1, and log-probs are [B width, K + 1].
    """
    places = np.arange(width) + starts[:, None]
    absent = torch.from_numpy(np.arange(width) >= kept_counts[:, None])
    rows = torch.from_numpy(places.clip(max=len(output.sampled_token_ids) - 1).flatten())
    tokens = output.sampled_token_ids[rows, 0].view(len(kept_counts), width).masked_fill(absent, -1)
    logprobs = output.logprobs_tensors
    if logprobs is not None:
        names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
        logprobs = logprobs._replace(**{name: getattr(logprobs, name)[rows] for name in names})
    return replace(output, sampled_token_ids=tokens, logprobs_tensors=logprobs)


def _set_back(generator: torch.Generator, state: torch.Tensor, num_tokens: int) -> None:
    """Set a generator to `state` plus the draws for `num_tokens` tokens, as vLLM's sampler makes them on CPUs."""
    generator.set_state(state)
    for _ in range(num_tokens):
        torch.randint(0, 2**31, (1,), generator=generator)


def _check_draws(generator: torch.Generator, state: torch.Tensor, num_tokens: int) -> None:
    """Raise RuntimeError unless the sampler, which drew `num_tokens` after `state`, draws as `_set_back` does."""
    reference = torch.Generator()
    _set_back(reference, state, num_tokens)
    if not torch.equal(reference.get_state(), generator.get_state()):
        raise RuntimeError("vLLM's sampler does not draw once per token; set engine.draft_tokens to 0")
