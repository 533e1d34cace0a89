"""`dppo-megatron certify` on one trainer rank; rank 0 also talks to the engine and writes the certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dppo_megatron.actor import Actor, init_layout
from dppo_megatron.actor.batch.packing import sequence
from dppo_megatron.actor.trace import CannotTrace, trace
from dppo_megatron.common.files import write_json
from dppo_megatron.common.ranks import Ranks, authenticate
from dppo_megatron.config import Config
from dppo_megatron.data.prompts import training_prompts
from dppo_megatron.data.tokenizer import end_token_ids, load_tokenizer
from dppo_megatron.engines.kinds import build_engine
from dppo_megatron.engines.protocol import Engine, EngineRefused, GenerateRequest
from dppo_megatron.engines.secret import read_secret
from dppo_megatron.engines.trace import Trace
from dppo_megatron.fleet.live_engines import LiveEngines
from dppo_megatron.fleet.registry import engine_services
from dppo_megatron.observability.logs import append_line, setup_logging
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import Rollout, TokenBatch
from dppo_megatron.weight_sync import build_publisher, weight_check_tokens
from dppo_megatron.weight_sync.engine_thread import EngineThread

from .compare import Difference, compare, logprob_table

CERTIFICATE = "certificate.json"
LIMIT_S = 3600.0  # of the whole measurement
TRACED = 512  # tokens at most: a trace is some tens of hidden states of every token and layer
PROGRESS = "progress.log"  # a line when a part of the work begins

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sample:
    """One response, and what the engine says of it by other ways than the one it was sampled by."""

    prompt: np.ndarray  # [P] int32
    rollout: Rollout
    alone: np.ndarray  # [P + R - 1] fp32 at temperature 1, scored in a pass of its own
    beside: np.ndarray  # the same, scored together with all others

    @property
    def token_ids(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.rollout.token_ids])


def run_rank(config: Config, url: str, prompts: int, checkpoint: Path | None = None) -> None:
    """Measures, and writes `CERTIFICATE` to `run.dir`. The environment says which rank this is, as for a trainer.

    With `checkpoint` these are its weights, which the engine gets from here by the transport of the config; as it gets
    those of the start model where a run would round them on the way (`engine.quantization: fp8_block_emulated`).
    """
    run = RunDir(config.run.dir)
    authenticate(read_secret(config))
    layout = init_layout(config)
    ranks = Ranks(LIMIT_S)  # rank 0 bounds what it asks the engine; who started the ranks ends them all when one fails
    ranks.begin_attempt()
    setup_logging(f"rank-{layout.rank}", run.root)
    actor = Actor(config, layout)
    if checkpoint is None:
        actor.load_start()
    else:
        actor.load_hf(checkpoint)
    how = "loaded by the engine"
    rounded = config.engine.quantization == "fp8_block_emulated"
    if checkpoint is not None or rounded:
        how = f"published by {_publish(config, actor, layout.rank)}{', rounded to FP8' if rounded else ''}"
    weights = f"{checkpoint or config.model.start}, {how}"
    certificate = {"weights": weights} | _Measurement(config, actor, ranks, url).certificate(prompts)
    if layout.rank == 0:
        write_json(run.root / CERTIFICATE, certificate)
    layout.close()


def _publish(config: Config, actor: Actor, rank: int) -> str:
    """To the engine, as after an update; the name of the transport."""
    run, engines, tokens = RunDir(config.run.dir), None, None
    if rank == 0:
        engines = EngineThread(lambda: LiveEngines(config, lambda: engine_services(config, run), build_engine))
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
        """The same on every rank but for the operators, which rank 0 alone knows."""
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

    async def _sample(self, engine: Engine, prompts: int) -> tuple[dict[str, Any], list[Sample]]:
        config, rollout = self._config, self._config.rollout
        info = await engine.check_compatible(config, vocab_size=self._actor.hf.vocab_size)
        tokenizer = load_tokenizer(config.model.path, self._actor.hf.vocab_size)
        source = training_prompts(config, tokenizer)
        end = end_token_ids(config.model.path, tokenizer)
        requests = [
            GenerateRequest(
                request_id=f"certify-{position}",
                token_ids=source.prompt(position).token_ids,
                n=1,
                seeds=(config.run.seed + position,),
                temperature=rollout.temperature,
                max_tokens=rollout.max_response_tokens,
                stop_token_ids=(*end, *rollout.stop_token_ids),
                routed_experts=rollout.routing_replay,
            )
            for position in range(min(prompts, len(source)))
        ]
        groups = await asyncio.gather(*map(engine.generate, requests))
        whole = [np.concatenate([r.token_ids, g[0].token_ids]) for r, g in zip(requests, groups, strict=True)]
        alone = [await engine.score(token_ids) for token_ids in whole]
        beside = await asyncio.gather(*map(engine.score, whole))
        head = {"engine": info.engine, "engine_dtype": info.dtype, "engine_model": info.model}
        parts = zip(requests, groups, alone, beside, strict=True)
        return head, [Sample(r.token_ids, g[0], a, b) for r, g, a, b in parts]

    def _logprobs(self, samples: Sequence[Sample]) -> tuple[dict[str, Any], list[dict[str, Any]], tuple[Sample, int]]:
        """The tables, every token's log-prob, and the token that differs most: its sample and place in the response."""
        replayed = [_batch(sample, self._config.rollout.temperature) for sample in samples]
        at_one = [_batch(sample, 1.0) for sample in samples]
        trained = self._score([_packed(replayed)], samples)
        alone = self._score(at_one, samples)
        sampled = _ends([s.rollout.rollout_logprob for s in samples], samples)
        prefill, beside = (_ends([getattr(s, way) for s in samples], samples) for way in ("alone", "beside"))
        tables = {
            "engine sampled, trainer packed": (sampled, trained),
            "engine scored alone, trainer alone": (prefill, alone),
            "engine: scored beside others, alone": (beside, prefill),
            "trainer: packed beside others, alone": (self._score([_packed(at_one)], samples), alone),
        }
        if self._config.rollout.temperature == 1:
            tables["engine: sampled, scored alone"] = (sampled, prefill)
        if self._actor.routing is not None:
            tables["trainer: routes replayed, its own"] = (alone, self._score(list(map(_own_routes, at_one)), samples))
        if not self._config.model.fp32_head and self._config.model.dtype != "fp32" and not self._fused:
            with self._fp32_head():
                tables["engine scored alone, trainer with model.fp32_head"] = (prefill, self._score(at_one, samples))
        off = [np.abs(a - b).max() for a, b in zip(sampled, trained, strict=True)]
        worst = int(np.argmax(off))
        place = int(np.abs(sampled[worst] - trained[worst]).argmax())
        return (
            {name: logprob_table(np.concatenate(a), np.concatenate(b)) for name, (a, b) in tables.items()},
            [
                {"token_ids": s.rollout.token_ids.tolist(), "engine": a.tolist(), "trainer": b.tolist()}
                for s, a, b in zip(samples, sampled, trained, strict=True)
            ],
            (samples[worst], place),
        )

    def _operators(self, sample: Sample, place: int) -> dict[str, Any]:
        """Of the pass up to the token that differs most, or of its first TRACED tokens."""
        token_ids = sample.token_ids[: min(len(sample.prompt) + place + 1, TRACED)]
        found = {"traced_tokens": len(token_ids)}

        async def record(engine: Engine) -> Trace | str:
            try:
                return (await engine.trace(token_ids))[0]
            except EngineRefused as error:
                return str(error)

        self._say(f"recording the pass of {len(token_ids)} tokens on both sides")
        given = self._on_engine(record, "the engine's trace")
        if isinstance(given, str):
            return found | {"operators": f"not available: {given}"}
        batch = sequence(token_ids, sample.rollout.routed_experts)
        try:
            free = compare(given, trace(self._actor, batch))
        except CannotTrace as error:
            return found | {"operators": f"not available: {error}"}
        own = compare(given, trace(self._actor, _own_routes(batch), given))
        beyond = [difference.name for difference in own if difference.beyond_rounding]
        return found | {
            "operators": {"accumulated": list(map(_entry, free)), "own": list(map(_entry, own))},
            "first": next((difference.name for difference in free if difference.differs), None),
            "first_beyond_rounding": next(iter(beyond), None),
            "beyond_rounding": beyond,
        }

    def _score(self, batches: list[TokenBatch], samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probs [R] of each sample's response, of batches that hold one sample each or one that holds all."""
        scored = torch.cat(self._actor.logprobs(batches)).numpy()
        ends = np.cumsum([len(sample.token_ids) for sample in samples])
        return _ends([scored[: end - 1] for end in ends], samples)

    @property
    def _fused(self) -> bool:
        return self._config.model.logits == "fused"

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

    def _on_engine(self, call: Callable[[Engine], Awaitable[Result]], what: str) -> Result:
        """What rank 0 learns of the engine, on every rank."""

        async def once() -> Result:
            engine = build_engine(self._config, self._url)
            try:
                return await call(engine)
            finally:
                await engine.close()

        return self._ranks.from_rank_zero(lambda: asyncio.run(once()), what)


def _batch(sample: Sample, temperature: float) -> TokenBatch:
    batch = sequence(sample.token_ids, sample.rollout.routed_experts)
    return replace(batch, temperature=torch.full(batch.mask.shape, temperature))


def _own_routes(batch: TokenBatch) -> TokenBatch:
    return replace(batch, routed_experts=None)


def _packed(batches: Sequence[TokenBatch]) -> TokenBatch:
    """All of them in one micro-batch, as in training."""
    lengths = torch.tensor([0, *(len(b.token_ids) for b in batches)], dtype=torch.int32)
    columns: dict[str, Tensor | None] = {}
    for name in (f.name for f in fields(TokenBatch)):
        parts = [getattr(batch, name) for batch in batches]
        columns[name] = None if parts[0] is None else torch.cat(parts)
    return TokenBatch(**columns | {"cu_seqlens": lengths.cumsum(0, dtype=torch.int32)})


def _ends(logprobs: Sequence[np.ndarray], samples: Sequence[Sample]) -> list[np.ndarray]:
    """The last R of each."""
    return [values[-len(sample.rollout.token_ids) :] for values, sample in zip(logprobs, samples, strict=True)]


def _entry(difference: Difference) -> dict[str, Any]:
    return {"name": difference.name, **asdict(difference)}
