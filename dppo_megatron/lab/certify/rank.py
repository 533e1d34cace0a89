"""Measures on a trainer rank for `dppo-megatron certify`; rank 0 also calls the engine and writes the certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dppo_megatron.common.files import write_json
from dppo_megatron.common.ranks import Ranks, authenticate
from dppo_megatron.config import Config
from dppo_megatron.data.micro_batches import Prefixes, plan_micro_batches
from dppo_megatron.data.packing import TokenSequence, pack
from dppo_megatron.data.prompts import training_prompts
from dppo_megatron.data.tokenizer import end_token_ids, load_tokenizer
from dppo_megatron.report.logs import append_line, setup_logging
from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import Engine, EngineRefused, GenerateRequest
from dppo_megatron.rollout.engines.secret import read_secret
from dppo_megatron.rollout.engines.trace import Trace
from dppo_megatron.rollout.fleet.live_engines import LiveEngines
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor import Actor, init_layout
from dppo_megatron.train.actor.batch.packing import sequence
from dppo_megatron.train.actor.trace import CannotTrace, trace
from dppo_megatron.train.weight_sync import build_publisher, weight_check_tokens
from dppo_megatron.train.weight_sync.engine_thread import EngineThread
from dppo_megatron.types import Prompt, Rollout

from .compare import Difference, compare, logprob_table

CERTIFICATE = "certificate.json"
LIMIT_S = 3600.0  # for the whole measurement
SAMPLES = 4  # limit per prompt, because training computes a prompt once for all samples of a group
TRACED = 512  # token limit, because a trace has tens of hidden states for every token and layer
PROGRESS = "progress.log"  # has a line for each part of the work

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """Contains a sampled response, and the log-probs that the engine gives when it scores the response."""

    prompt: Prompt  # P tokens
    rollout: Rollout
    alone: np.ndarray  # [P + R - 1] fp32 at temperature 1, scored in a separate pass
    together: np.ndarray  # likewise, scored together with all other responses


def run_rank(config: Config, url: str, prompts: int, checkpoint: Path | None = None) -> None:
    """Measure and write `CERTIFICATE` to `run.dir`. Environment variables give the rank, as for a trainer.

    With `checkpoint`, the trainer loads these weights and publishes them to the engine by the configured transport. The
    start model is also published if a run would round weights (`engine.quantization: fp8_block_emulated`).
    """
    run = RunDir(config.run.dir)
    authenticate(read_secret(config))
    layout = init_layout(config)
    ranks = Ranks(LIMIT_S)  # rank 0 limits its engine calls; the command ends all ranks if any rank fails
    ranks.begin_attempt()
    setup_logging(f"rank-{layout.rank}", run.root)
    actor = Actor(config, layout)
    if checkpoint is None:
        actor.load_start()
    else:
        actor.load_hf(checkpoint)
    origin = "loaded by the engine"
    rounded = config.engine.quantization == "fp8_block_emulated"
    if checkpoint is not None or rounded:
        origin = f"published by {_publish(config, actor, layout.rank)}{', rounded to FP8' if rounded else ''}"
    weights = f"{checkpoint or config.model.start}, {origin}"
    certificate = {"weights": weights} | _Measurement(config, actor, ranks, url).certificate(prompts)
    if layout.rank == 0:
        write_json(run.root / CERTIFICATE, certificate)
    layout.close()


def _publish(config: Config, actor: Actor, rank: int) -> str:
    """Publish the weights to the engine, as after an update; return the transport name."""
    engines, tokens = None, None
    if rank == 0:
        engines = EngineThread(LiveEngines(config))
        prompts = training_prompts(config, load_tokenizer(config.model.path))
        tokens = weight_check_tokens(prompts, config.engine.max_model_len)
    publisher = build_publisher(config, actor, engines, tokens)
    publisher.publish(version=1)
    publisher.close()
    return config.weight_sync.transport


class _Measurement:
    def __init__(self, config: Config, actor: Actor, ranks: Ranks, url: str):
        self._config, self._actor, self._ranks, self._url = config, actor, ranks, url

    def certificate(self, prompts: int) -> dict[str, Any]:
        """Measure and return the certificate. Ranks have equal results, except for operators, which only rank 0 has."""
        self._say(f"sampling answers to {prompts} prompts")
        head, samples = self._on_engine(lambda engine: self._sample(engine, prompts), "the engine's samples")
        self._say(f"scoring {sum(len(s.rollout.token_ids) for s in samples)} tokens")
        logprobs, responses, worst = self._logprobs(samples)
        return {
            **head,
            "trainer_dtype": self._config.model.dtype,
            "layout": self._actor.layout.describe(),
            "samples": len(samples),
            "logprobs": logprobs,
            "responses": responses,
            **self._operators(*worst),
        }

    async def _sample(self, engine: Engine, prompts: int) -> tuple[dict[str, Any], list[ScoredResponse]]:
        config, rollout = self._config, self._config.rollout
        info = await engine.check_compatible(config, vocab_size=self._actor.hf.vocab_size)
        tokenizer = load_tokenizer(config.model.path, self._actor.hf.vocab_size)
        source = training_prompts(config, tokenizer)
        end = end_token_ids(config.model.path, tokenizer)
        prompt_list = [source.prompt(position) for position in range(min(prompts, len(source)))]
        n = min(rollout.group_size, SAMPLES)
        requests = [
            GenerateRequest(
                request_id=f"certify-{position}",
                token_ids=prompt.token_ids,
                n=n,
                seeds=tuple(config.run.seed + n * position + i for i in range(n)),
                temperature=rollout.temperature,
                max_tokens=rollout.max_response_tokens,
                stop_token_ids=(*end, *rollout.stop_token_ids),
                routed_experts=rollout.routing_replay,
            )
            for position, prompt in enumerate(prompt_list)
        ]
        groups = await asyncio.gather(*map(engine.generate, requests))
        sampled = [(prompt, r) for prompt, group in zip(prompt_list, groups, strict=True) for r in group]
        whole = [np.concatenate([prompt.token_ids, r.token_ids]) for prompt, r in sampled]
        alone = [await engine.score(token_ids) for token_ids in whole]
        together = await asyncio.gather(*map(engine.score, whole))
        head = {"engine": info.engine, "engine_dtype": info.dtype, "engine_model": info.model}
        return head, [ScoredResponse(*one, a, b) for one, a, b in zip(sampled, alone, together, strict=True)]

    def _logprobs(
        self, samples: Sequence[ScoredResponse]
    ) -> tuple[dict[str, Any], list[dict[str, Any]], tuple[ScoredResponse, int]]:
        """Compare log-probs of engine and trainer. Return:

        - a table for each comparison, by name
        - token ids and log-probs of each response
        - the token that differs most, as (sample, position in the response)
        """
        rollout = self._config.rollout
        build = partial(TokenSequence.from_rollout, advantage=1.0, loss_weight=1.0, temperature=rollout.temperature)
        at_run = [build(s.prompt, s.rollout, replay_routing=rollout.routing_replay) for s in samples]
        at_one = [replace(s, temperature=1.0) for s in at_run]
        shares = self._actor.shares_prefixes
        trained, alone = self._packed(at_run, samples, shares), self._score(at_one)
        whole = self._packed(at_run, samples, False) if shares else trained
        sampled = [s.rollout.rollout_logprob for s in samples]
        prefill, together = (
            [getattr(s, way)[-len(s.rollout.token_ids) :] for s in samples] for way in ("alone", "together")
        )
        tables = {
            "engine sampled, trainer packed": (sampled, trained),
            "engine scored alone, trainer alone": (prefill, alone),
            "engine: scored with others, alone": (together, prefill),
            "trainer: packed with others, alone": (whole, self._score(at_run)),
        }
        if shares:
            tables["trainer: packed with prompts once, whole"] = (trained, whole)
        if rollout.temperature == 1:
            tables["engine: sampled, scored alone"] = (sampled, prefill)
        if self._actor.routing is not None:
            own_routing = [
                replace(s, columns={n: a for n, a in s.columns.items() if n != "routed_experts"}) for s in at_one
            ]
            tables["trainer: routes replayed, its own"] = (alone, self._score(own_routing))
        model = self._config.model
        if not model.fp32_head and model.dtype != "fp32" and model.logits != "fused":
            with self._fp32_head():
                tables["engine scored alone, trainer with model.fp32_head"] = (prefill, self._score(at_one))
        max_differences = [np.abs(a - b).max() for a, b in zip(sampled, trained, strict=True)]
        worst = int(np.argmax(max_differences))
        place = int(np.abs(sampled[worst] - trained[worst]).argmax())
        return (
            {name: logprob_table(np.concatenate(a), np.concatenate(b)) for name, (a, b) in tables.items()},
            [
                {"token_ids": s.rollout.token_ids.tolist(), "engine": a.tolist(), "trainer": b.tolist()}
                for s, a, b in zip(samples, sampled, trained, strict=True)
            ],
            (samples[worst], place),
        )

    def _operators(self, sample: ScoredResponse, place: int) -> dict[str, Any]:
        """Compare operators in a pass up to the token that differs most, over at most the first TRACED tokens."""
        prompt = sample.prompt.token_ids
        token_ids = np.concatenate([prompt, sample.rollout.token_ids[: place + 1]])[:TRACED]
        section = {"traced_tokens": len(token_ids)}

        async def record(engine: Engine) -> Trace | str:
            try:
                return (await engine.trace(token_ids))[0]
            except EngineRefused as error:
                return str(error)

        self._say(f"recording the pass of {len(token_ids)} tokens on both sides")
        engine_trace = self._on_engine(record, "the engine's trace")
        if isinstance(engine_trace, str):
            return section | {"operators": f"not available: {engine_trace}"}
        batch = sequence(token_ids, sample.rollout.routed_experts)
        try:
            trainer_trace = trace(self._actor, batch)  # empty on ranks other than 0
        except CannotTrace as error:
            return section | {"operators": f"not available: {error}"}
        accumulated = compare(engine_trace, trainer_trace)
        local_differences = compare(engine_trace, trace(self._actor, replace(batch, routed_experts=None), engine_trace))
        outlier_names = [difference.name for difference in local_differences if difference.beyond_rounding]
        return section | {
            "recorded": len(engine_trace.keys() | trainer_trace.keys()),
            "operators": {"accumulated": list(map(_entry, accumulated)), "own": list(map(_entry, local_differences))},
            "first": next((difference.name for difference in accumulated if difference.differs), None),
            "first_beyond_rounding": next(iter(outlier_names), None),
            "beyond_rounding": outlier_names,
        }

    def _packed(
        self, sequences: list[TokenSequence], samples: Sequence[ScoredResponse], share: bool
    ) -> list[np.ndarray]:
        """Return each response's log-probs [R], packed as in an update. `share` computes each prompt once."""
        groups, lengths = ([s.prompt.position for s in samples], [len(s.prompt.token_ids) for s in samples])
        prefixes = Prefixes(np.array(groups), np.array(lengths)) if share else None
        (plan,) = plan_micro_batches(list(map(len, sequences)), 1, self._config.train.micro_batch_tokens, prefixes)
        return self._score(sequences, plan, share)

    def _score(
        self, sequences: list[TokenSequence], plan: Sequence[list[int]] = (), share: bool = False
    ) -> list[np.ndarray]:
        """Return each response's log-probs [R], computed in `plan`'s micro-batches, by default in separate passes."""
        plan = plan or [[index] for index in range(len(sequences))]
        batches = [pack([sequences[i] for i in indices], share_prefixes=share) for indices in plan]
        logprobs: dict[int, np.ndarray] = {}
        for indices, batch, scored in zip(plan, batches, self._actor.logprobs(batches), strict=True):
            parts = scored[batch.mask].split([sequences[i].learned for i in indices])
            logprobs |= {i: part.numpy() for i, part in zip(indices, parts, strict=True)}
        return [logprobs[i] for i in range(len(sequences))]

    @contextmanager
    def _fp32_head(self) -> Iterator[None]:
        for chunk in self._actor.model_chunks:
            chunk.fp32_head = True
        try:
            yield
        finally:
            for chunk in self._actor.model_chunks:
                chunk.fp32_head = False

    def _say(self, line: str) -> None:
        if self._actor.layout.rank == 0:
            append_line(RunDir(self._config.run.dir).root / PROGRESS, line)

    def _on_engine(self, call: Callable[[Engine], Awaitable[Result]], subject: str) -> Result:
        """Call the engine on rank 0 and return the result on every rank."""

        async def once() -> Result:
            engine = build_engine(self._config, self._url)
            try:
                return await call(engine)
            finally:
                await engine.close()

        return self._ranks.from_rank_zero(lambda: asyncio.run(once()), subject)


def _entry(difference: Difference) -> dict[str, Any]:
    return {"name": difference.name, **asdict(difference)}
