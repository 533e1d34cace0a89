"""Publish a policy version to the engines. Engines confirm a version if they score given tokens like the trainer."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.protocol import Engine, EngineError, EngineIncompatible, EngineInfo, EngineRefused
from dppo_megatron.rollout.fleet.engine_checks import (
    Confirmation,
    OtherWeights,
    ScoreDifference,
    check_weights,
    some_groups,
)
from dppo_megatron.rollout.fleet.live_engines import LiveEngines
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor import Actor
from dppo_megatron.weights.fingerprint import merged, untold
from dppo_megatron.weights.published import PublishedPolicy

from .engine_thread import EngineThread
from .transport import Transport, WeightSyncError

log = logging.getLogger(__name__)

RETRY_S = 0.2
ATTEMPTS = 3  # most attempts with the same engines
Replies = Mapping[str, Confirmation | EngineError]  # by engine URL


@dataclass(frozen=True, slots=True)
class PublishResult:
    """Describes the cost (in seconds) and the result of a publish. Equal on every rank."""

    version: int
    nbytes: int  # sent bytes
    export_s: float  # until the engines begin to load
    load_s: float  # the slowest engine's time
    pause_s: float  # longest time that an engine did not sample while it loaded
    check_s: float  # time for scoring the weight check's tokens
    difference: ScoreDifference  # of the confirmed engine that differs most
    unconfirmed: int = 0  # engines that were left out
    changed_share: float | None = None  # share of all elements, if only changed elements were sent

    def metrics(self) -> dict[str, float]:
        changed = {} if self.changed_share is None else {"publish/changed_share": self.changed_share}
        return {
            **changed,
            "publish/bytes": float(self.nbytes),
            "probe/mean_abs_logprob_difference": self.difference.mean,
            "probe/max_abs_logprob_difference": self.difference.largest,
            "publish/bytes_per_s": self.nbytes / max(self.export_s + self.load_s, 1e-9),
            "time/publish_export_s": self.export_s,
            "time/publish_load_s": self.load_s,
            "time/publish_probe_s": self.check_s,
            "time/publish_pause_s": self.pause_s,
            "engine/unconfirmed": float(self.unconfirmed),
        }


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Contains the result, or None if no engine confirmed the version, and the reason for each failure.

    Keys of `failures` are engine URLs, "sender RANK" for trainer ranks, and "group".
    """

    published: PublishResult | None = None
    failures: dict[str, str] = field(default_factory=dict)


class Publisher:
    """Publishes policy versions, collectively over all trainer ranks.

    Global rank 0 calls the engines and writes the published-policy file. `engines` is None on the other ranks.
    `check_tokens` [S] is a fixed token sequence that both sides score at temperature 1 after each update.

    An engine that dies loses the update, because the update is only in memory and the trainer does not wait for the
    engine. The run loses no data. The loss is handled in this order:

    1. The publish continues without the engine if another engine confirms the version (`_confirm`). Otherwise the
       publish waits for an engine (`_Retries.wait`).
    2. The version is published when the published-policy file is written (`_record`).
    3. The version that a returning engine reports is not trusted, because the engine's death ended the verification
       (`fleet.health.EngineHealth.answered`).
    4. With `shared_storage` the orchestrator makes the engine load the published directory
       (`fleet.monitored_engine.MonitoredEngine._verify`). A `broadcast` left no directory, so the trainer sends the
       version again: `trainer.control` asks `engines_lag` while the trainer waits for rollouts.
    5. Another engine answers the requests that ran on the dead engine, with the same seeds (`fleet.sampling.Sampler`).
    """

    def __init__(
        self,
        config: Config,
        actor: Actor,
        engines: EngineThread | None,
        ranks: Ranks,
        transport: Transport,
        check_tokens: np.ndarray,
    ):
        self._config = config
        self._run = RunDir(config.run.dir)
        self._actor = actor
        self._engines = engines
        self._ranks = ranks
        self._transport = transport
        self._check_tokens = check_tokens
        self._colocated = config.engine.placement == "colocated"
        self._offloaded: ExitStack | None = None  # restores a colocated actor that is not on the device
        self._last: PublishedPolicy | None = None
        self._lagging: set[tuple[str, str]] = set()  # URL and instance of engines that were seen to lag
        self._partly_covered: set[str] = set()  # URLs of engines with fingerprints that do not cover all weights

    def publish(self, version: int) -> PublishResult:
        """Send the weights to every engine that answers, compare log-probs, and write the published policy.

        An engine is left out if it is dead, freezes, or fails, or if its log-probs differ by more than
        `weight_sync.probe_tolerance` in the mean. Engines do not sample before their weights are verified. If no engine
        is left, the publish waits until an engine returns.

        Raises `WeightSyncError` on every rank in these cases:

        - An engine refuses the weights.
        - Engines loaded the weights, but none agrees with the trainer.
        - No engine answers for `engine.unavailable_timeout_s`.
        - All attempts with the same engines fail (`ATTEMPTS`).

        A colocated actor is offloaded before the engines wake, and must not be used until `onload_actor`.
        """
        started = time.perf_counter()
        self._transport.prepare(version)
        expected = None
        if self._colocated:
            expected = self._actor.score(self._check_tokens)
            self._offload_actor()
        exported = time.perf_counter() - started
        retries = _Retries(version, self._config.engine.unavailable_timeout_s)
        while True:
            engines, silent = self._ranks.from_rank_zero(self._answering, "the engines that answer")
            result = self._attempt(version, engines, exported, expected) if engines else AttemptResult()
            failures = silent | result.failures
            if result.published is not None:
                for name, reason in failures.items():
                    log.warning("policy %d is published without %s: %s", version, name, reason)
                return replace(result.published, unconfirmed=len(failures))
            self._ranks.from_rank_zero(partial(retries.wait, engines, failures), "an engine to publish to")
            if engines:
                self._transport.prepare_again(version)

    def engines_lag(self) -> bool:
        """Return on rank 0 whether a reachable engine lacks a broadcast policy; each instance is reported once.

        Engines that read directories load the published directory without the trainer.
        """
        if self._last is None or self._last.path is not None:
            return False
        engines, _ = self._answering()
        lagging_instances = {
            (url, info.instance)
            for url, info in engines.items()
            if (self._last.confirmed.get(url), self._last.version) != (info.instance, info.version)
        }
        new = lagging_instances - self._lagging
        self._lagging |= new
        return bool(new)

    def onload_actor(self) -> None:
        """Put colocated engines to sleep and move the actor to the device, where it stays until the next publish.

        The actor is on the device even when this raises `WeightSyncError` because an engine did not go to sleep.
        """
        if self._colocated:
            try:
                self._ranks.from_rank_zero(lambda: self._rank_zero().put_to_sleep(), "the engines to sleep")
            finally:
                offloaded, self._offloaded = self._offloaded, None
                if offloaded is not None:
                    offloaded.close()

    def _offload_actor(self) -> None:
        if self._offloaded is None:
            self._offloaded = ExitStack()
            freed = self._offloaded.enter_context(self._actor.offloaded())
            log.debug("offloaded %.2f GB for the engines", freed / 1e9)
        self._ranks.gather(None, "the actor to be offloaded")  # an engine may be on the GPUs of several ranks

    def _rank_zero(self) -> EngineThread:
        assert self._engines is not None, "only rank 0 calls the engines"
        return self._engines

    def _answering(self) -> tuple[dict[str, EngineInfo], dict[str, str]]:
        engines, silent = self._rank_zero().start(LiveEngines.answering).result()
        return engines, {name: str(error) for name, error in silent.items()}

    def _attempt(
        self, version: int, engines: Mapping[str, EngineInfo], export_s: float, expected: np.ndarray | None
    ) -> AttemptResult:
        """Attempt to connect to these engines, load and confirm. The result is equal on every rank.

        `expected` has the trainer's scores, or None if they do not exist yet.
        """
        started = time.perf_counter()
        try:
            self._transport.connect(engines)
        except WeightSyncError as error:
            return AttemptResult(failures={"group": str(error)})
        if self._engines is not None:  # rank 0: the engines load and score while all ranks send and score
            load = partial(self._load, version=version)
            tokens = self._check_tokens
            loading = self._engines.start(lambda live: live.load_and_confirm(version, engines, load, tokens))
        problem = self._transport.send()
        # This gather must precede the next training collective, because a sender waits for engines.
        everyone = self._ranks.gather((problem, self._transport.sent), "the weights to be sent")
        if expected is None:
            expected = self._actor.score(self._check_tokens)

        def confirm() -> AttemptResult:
            replies = loading.result()
            cost = {"export_s": export_s, "wall_s": time.perf_counter() - started}
            problems = {f"sender {rank}": problem for rank, (problem, _) in enumerate(everyone) if problem}
            return self._confirm(version, replies, expected, merged(sent for _, sent in everyone), problems, **cost)

        return self._ranks.from_rank_zero(confirm, f"the engines to load policy version {version}")

    async def _load(self, engine: Engine, version: int) -> float:
        try:
            if self._colocated:
                await engine.wake()
            return await self._transport.receive(engine, version)
        except BaseException as error:
            self._transport.abort(str(error) or f"engine {engine.url}: cancelled")
            raise

    def _confirm(
        self,
        version: int,
        replies: Replies,
        expected: np.ndarray,
        sent: Mapping[str, int],
        problems: dict[str, str],
        *,
        export_s: float,
        wall_s: float,
    ) -> AttemptResult:
        """Compare each engine's log-probs and fingerprints with the trainer's on rank 0, and record the publish.

        Engines that failed or disagree are left out if another engine agrees. Raises `WeightSyncError` when an engine
        refused the weights, and when engines loaded the weights but none agrees.
        """
        confirmed = [reply for reply in replies.values() if isinstance(reply, Confirmation)]
        failures = {}
        for url, reply in replies.items():
            if isinstance(reply, EngineRefused | EngineIncompatible):
                raise WeightSyncError(f"policy version {version}: {reply}")
            if isinstance(reply, EngineError):
                failures[url] = str(reply)
        if not confirmed:
            return AttemptResult(failures=failures | problems)
        agreed: dict[str, ScoreDifference] = {}
        directory = self._transport.directory(version)
        policy = PublishedPolicy(
            version,
            str(directory) if directory else None,
            time.time(),
            probe_tokens=self._check_tokens.tolist(),
            probe_logprobs=np.asarray(expected, np.float32).tolist(),
            fingerprint=dict(sent) if self._config.weight_sync.fingerprint else None,
        )
        for reply in confirmed:
            try:
                agreed[reply.url] = check_weights(self._config, reply, policy)
            except OtherWeights as error:
                failures[reply.url] = str(error)
            self._report_untold(reply)
        if not agreed:
            reasons = "\n".join(f"  {url}: {reason}" for url, reason in failures.items())
            raise WeightSyncError(f"policy version {version}: no engine agrees with the trainer:\n{reasons}")
        load_s = max(confirmation.load_s for confirmation in confirmed)
        self._record(policy, {reply.url: reply.instance for reply in confirmed if reply.url in agreed})
        published = PublishResult(
            version,
            self._transport.nbytes,
            export_s,
            load_s,
            max(confirmation.pause_s for confirmation in confirmed),
            wall_s - load_s,
            ScoreDifference.worst(agreed.values()),
            changed_share=self._transport.changed_share,
        )
        return AttemptResult(published, failures)

    def _report_untold(self, reply: Confirmation) -> None:
        if (groups := untold(reply.fingerprint or {})) and reply.url not in self._partly_covered:
            self._partly_covered.add(reply.url)
            reason = "its loader changes these weights, so fingerprints do not cover them (docs/engines.md)"
            log.warning("engine %s gives no fingerprint of %s: %s", reply.url, some_groups(groups), reason)

    def _record(self, policy: PublishedPolicy, confirmed: dict[str, str]) -> None:
        """Write the published-policy file; `policy` is then the policy to serve. `confirmed`: see PublishedPolicy."""
        if self._last is None or self._last.version != policy.version:
            self._lagging.clear()
        self._lagging -= set(confirmed.items())
        self._last = replace(policy, confirmed=confirmed)
        self._last.write(self._run.published)
        self._transport.after_confirmation(policy.version)

    def close(self) -> None:
        self._transport.close()
        if self._engines is not None:
            self._engines.close()


class _Retries:
    """Limits the wait for an engine (`timeout_s`) and the attempts with the same engines (`ATTEMPTS`), on rank 0.

    Attempts are not timed; each attempt restarts the wait, because an engine answered. Engines die one after the other,
    so only attempts with the same engines are counted.
    """

    def __init__(self, version: int, timeout_s: float):
        self._version = version
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._attempts: Counter[frozenset[str]] = Counter()  # by engine URLs
        self._reported = ""

    def wait(self, attempted: Collection[str], failures: Mapping[str, str]) -> None:
        """Wait `RETRY_S` after an attempt with the engines `attempted`, which may be empty.

        Raises `WeightSyncError` when time or attempts are used up.
        """
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in failures.items()) or "  none is registered"
        if attempted:
            self._deadline = time.monotonic() + self._timeout_s
            self._attempts[frozenset(attempted)] += 1
        if self._attempts[frozenset(attempted)] >= ATTEMPTS:
            raise WeightSyncError(
                f"policy version {self._version}: no engine could load it in {ATTEMPTS} attempts:\n{reasons}"
            )
        if time.monotonic() > self._deadline:
            raise WeightSyncError(
                f"policy version {self._version}: waited {self._timeout_s:g} s (engine.unavailable_timeout_s) for an "
                f"engine to publish it to:\n{reasons}"
            )
        if reasons != self._reported:
            left = max(0.0, self._deadline - time.monotonic())
            named = "; ".join(line.strip() for line in reasons.splitlines())
            log.warning(
                "policy %d: waiting for an engine to publish it to, %.0f s left: %s", self._version, left, named
            )
        self._reported = reasons
        time.sleep(RETRY_S)
