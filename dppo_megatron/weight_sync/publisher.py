"""Publishes a policy version through shared storage and believes it only when engine and trainer agree on a probe."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from dppo_megatron.actor import Actor
from dppo_megatron.config import Config
from dppo_megatron.hf import save_hf
from dppo_megatron.rollout.engine import Engine
from dppo_megatron.rollout.published import PublishedPolicy
from dppo_megatron.run_dir import RunDir

from .engine_thread import EngineThread
from .live_engines import Confirmation, WeightSyncError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Published:
    """What one publish cost and confirmed; seconds. Complete on the rank that talks to the engines."""

    version: int
    export_s: float
    load_s: float
    probe_s: float
    probe_difference: float  # largest absolute log-prob difference over the probe's tokens and engines
    unconfirmed: int = 0  # engines that did not answer; the orchestrator catches them up

    def metrics(self) -> dict[str, float]:
        return {
            "probe/max_abs_logprob_difference": self.probe_difference,
            "time/publish_export_s": self.export_s,
            "time/publish_load_s": self.load_s,
            "time/publish_probe_s": self.probe_s,
            "engine/unconfirmed": float(self.unconfirmed),
        }


class Publisher:
    """Collective over all trainer ranks; global rank 0 talks to the engines and writes the published-policy file.

    `probe` is a fixed token sequence [P] that both sides score at temperature 1 after each update.
    """

    def __init__(
        self,
        config: Config,
        actor: Actor,
        engines: EngineThread | None,
        probe: np.ndarray,
    ):
        self._config = config
        self._run = RunDir(config.run.dir)
        self._actor = actor
        self._engines = engines
        self._probe = probe
        self._kept: list[int] = []

    def publish(self, version: int) -> Published:
        """Exports, loads into every engine that answers, compares log-probs, and only then names `version` published.

        Raises `WeightSyncError` when an engine refuses, scores the probe differently by more than
        `weight_sync.probe_tolerance`, or when no engine answers (see `LiveEngines.publish`).
        """
        started = time.perf_counter()
        directory = self._run.weights_of(version)
        save_hf(
            self._actor.model_chunks,
            directory,
            template_dir=self._config.model.path,
            dtype=_DTYPES[self._config.engine.dtype],
            overwrite=True,
        )
        exported = time.perf_counter()
        scores: Future | None = None
        if self._engines is not None:

            def load(engine: Engine) -> Awaitable[None]:
                return engine.load_weights(directory.resolve(), version)

            scores = self._engines.start(lambda engines: engines.publish(version, load, self._probe))
        expected = self._actor.score(self._probe)  # every rank computes while the engines load
        if scores is None:
            return Published(version, exported - started, 0.0, 0.0, 0.0)
        confirmed, left_out = self._wait_for(version, scores)
        difference = self._compare(version, expected, confirmed)
        load_s = max(confirmation.load_s for confirmation in confirmed)
        probed = time.perf_counter()
        PublishedPolicy(
            version,
            str(directory.resolve()),
            time.time(),
            confirmed={confirmation.url: confirmation.instance for confirmation in confirmed},
            probe_tokens=self._probe.tolist(),
            probe_logprobs=np.asarray(expected, np.float32).tolist(),
        ).write(self._run.published)
        self._prune(version)
        return Published(version, exported - started, load_s, probed - exported - load_s, difference, left_out)

    def _wait_for(self, version: int, scores: Future) -> tuple[list[Confirmation], int]:
        timeout = self._config.weight_sync.timeout_s + self._config.engine.unavailable_timeout_s
        try:
            return scores.result(timeout=timeout)
        except TimeoutError:
            raise WeightSyncError(
                f"policy version {version}: the engines did not load and score it within {timeout:.0f} s "
                "(weight_sync.timeout_s + engine.unavailable_timeout_s); see the engine logs"
            ) from None

    def _compare(self, version: int, expected: np.ndarray, confirmed: Sequence[Confirmation]) -> float:
        difference = max(float(np.abs(confirmation.scores - expected).max()) for confirmation in confirmed)
        tolerance = self._config.weight_sync.probe_tolerance
        if not difference <= tolerance:  # also when it is NaN
            raise WeightSyncError(
                f"policy version {version}: engine and trainer log-probs of the probe differ by {difference:.3g}, more "
                f"than weight_sync.probe_tolerance = {tolerance:g}. The engine does not serve the trainer's weights or "
                f"computes in another precision (engine.dtype = {self._config.engine.dtype}, model.dtype = "
                f"{self._config.model.dtype}); do not train on its rollouts"
            )
        return difference

    def _prune(self, version: int) -> None:
        """Keeps the newest versions; an engine that restarts loads the published one, which is always among them."""
        if version in self._kept:
            self._kept.remove(version)
        self._kept.append(version)
        while len(self._kept) > self._config.weight_sync.keep_versions:
            shutil.rmtree(self._run.weights_of(self._kept.pop(0)), ignore_errors=True)
