"""Update an SGLang server's weights from a directory or a broadcast; running requests are kept, awaited or aborted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import uuid4

from dppo_megatron.config import Config
from dppo_megatron.hf import read_hf_config
from dppo_megatron.hf.peft import adapter_problems
from dppo_megatron.rollout.engines.byte_budget import ByteBudget
from dppo_megatron.rollout.engines.client import HttpEngine
from dppo_megatron.rollout.engines.guard.asgi import RefusedPath, inside_roots
from dppo_megatron.rollout.engines.http import CONTROL_TIMEOUT_S
from dppo_megatron.rollout.engines.protocol import (
    EngineError,
    EngineIncompatible,
    EngineRefused,
    EngineTimeout,
    UpdateMode,
)
from dppo_megatron.rollout.engines.serving import start_model
from dppo_megatron.weights.broadcast_plan import WeightGroupPlan
from dppo_megatron.weights.delta import is_delta
from dppo_megatron.weights.manifest import BadWeights, Manifest, UnreadableWeights
from dppo_megatron.weights.process_group import WeightGroupError, WeightRendezvous, nccl_problem

from .plugin.dppo_sglang_plugin import CUMEM, HAS_READ, NCCL, READ, READ_AHEAD, READING, STATE
from .wire import ASLEEP, EMPTY, reported_version

READ_POLL_S = 0.01
IDLE_POLL_S = 0.05
CLEAN_UP_TIMEOUT_S = 2.0  # for each request after a failure, because the server may not answer any more
INCONSISTENT = "inconsistent"  # label for weights that mix the old and the new version
NO_PLUGIN = (
    "its PYTHONPATH lacks the folder rollout/engines/sglang/plugin of dppo_megatron, with which `dppo-megatron engine` "
    "starts it; fingerprints (weight_sync.fingerprint), adapters (weight_sync.lora) and broadcasts over NCCL need it"
)
UPDATING = "updating-"  # label prefix during an update, followed by the update's name


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Describes the trainer's weight group that the server joined through this client."""

    plan: WeightGroupPlan
    rendezvous: WeightRendezvous
    workers: int


class SglangWeights(HttpEngine):
    """Updates the weights for `SglangEngine` through the server's routes, one update at a time.

    SGLang would also load weights of another model, or an adapter for another model. This class rejects them.
    """

    def __init__(self, config: Config, url: str, budget: ByteBudget | None):
        super().__init__(config, url, budget, "is it an SGLang server of at least 0.5.23?")
        self._start_model = start_model(config)
        self._read_ahead_bytes = config.weight_sync.read_ahead_bytes
        self._adapters = config.model.lora if config.weight_sync.lora == "adapter" else None
        self._sleeps = config.engine.placement == "colocated"
        self._manifest: Manifest | None = None
        self._updates = asyncio.Lock()
        self._group: _Group | None = None

    @property
    def _weight_group(self) -> str:
        """Return the name of the weight group that the server joined through this client; empty = none."""
        return "" if self._group is None else self._group.plan.name

    async def load_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> float:
        path = Path(path).absolute()
        action = f"loading policy {version} from {path}"
        await self._check_not(action, ASLEEP)
        async with self._updates:
            deadline = time.monotonic() + self._update_timeout_s
            await asyncio.to_thread(self._check_weights, action, path)
            # Without the plug-in SGLang would load a delta's file as weights.
            if self._adapters is not None or is_delta(path):
                workers = len(await self._ask_plugin(action, NCCL))
                if self._adapters is None:
                    await self._read_ahead(action, path, self._read_ahead_bytes // workers, deadline)
            if mode == "wait":
                await self._wait_until_idle(action, deadline)
            async with self._paused(action, mode, deadline) as since, self._updating(action, deadline):
                body = {"model_path": str(path), "weight_version": str(int(version)), "flush_cache": True}
                await self._calls.call(action, "/update_weights_from_disk", _left(deadline), body=body)
            return time.monotonic() - since

    async def _read_ahead(self, action: str, path: Path, most_bytes: int, deadline: float) -> None:
        """Make the schedulers read `path` while they sample. Raises `EngineError` if any scheduler fails."""
        command, pause_s = f"{READ_AHEAD} {most_bytes} {path}", READ_POLL_S
        while True:
            reports = await self._ask_plugin(action, command, _left(deadline))
            states = {worker.get(STATE, "garbled reply") for worker in reports}
            if problems := states - {READING, READ}:
                raise EngineError(
                    f"engine {self.url}: {action}: {'; '.join(sorted(problems))}; the old weights stay in use"
                )
            if command == HAS_READ and states == {READ}:
                return
            if time.monotonic() > deadline:
                raise EngineTimeout(
                    f"engine {self.url}: {action}: not read within {self._update_timeout_s:g} s "
                    "(weight_sync.timeout_s); the old weights stay in use"
                )
            command = HAS_READ
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 50 * READ_POLL_S)

    async def sleep(self) -> None:
        """Wait for running requests, then free the memory for weights and cache.

        Until weights are loaded again the server queues the requests that clients still send.
        """
        action = "going to sleep"
        async with self._updates:
            deadline = time.monotonic() + self._update_timeout_s
            label = await self._present_label(action)
            if label.startswith(ASLEEP):
                return
            if not label.startswith(EMPTY):
                await self._wait_until_idle(action, deadline)
            # A scheduler that is not idle would exit. Only this pause mode aborts requests that arrived after the wait,
            # and it uses no core: it stops the server's HTTP process. The other modes stop the scheduler, which then
            # spins.
            await self._calls.call(action, "/pause_generation", _left(deadline), body={"mode": "abort"})
            await self._occupy(action, "/release_memory_occupation", f"{ASLEEP}{reported_version(label)}", deadline)

    async def wake(self) -> None:
        """Allocate the memory again, with arbitrary contents. Do nothing if weights are served."""
        action = "waking up"
        async with self._updates:
            deadline = time.monotonic() + self._update_timeout_s
            label = await self._present_label(action)
            if label.startswith((ASLEEP, EMPTY, UPDATING, INCONSISTENT)):
                await self._occupy(action, "/resume_memory_occupation", f"{EMPTY}{reported_version(label)}", deadline)

    async def _occupy(self, action: str, route: str, label: str, deadline: float) -> None:
        """Free or allocate the memory through `route`, then set `label`."""
        async with self._updating(action, deadline):
            await self._calls.call(action, route, _left(deadline), body={})
            await self._label(action, label)

    async def _check_not(self, action: str, *labels: str) -> None:
        """Raise `EngineError` if the weights' label begins with any of `labels`, `ASLEEP` or `EMPTY`.

        Only colocated engines sleep, so other engines are not asked.
        """
        if self._sleeps and (await self._present_label(action)).startswith(labels):
            raise EngineError(
                f"engine {self.url}: {action}: it was put to sleep, which discards its weights; wake it and load them"
            )

    async def join_weight_group(self, plan: WeightGroupPlan) -> None:
        action, workers = f"joining weight group {plan.name}", (await self.info()).workers
        async with self._updates:
            self._check_manifest(action, lambda: Manifest.from_tensors(plan.name, plan.tensors()))
            if plan.nccl:
                report, *_ = await self._ask_plugin("its version of NCCL", NCCL)
                if problem := nccl_problem(plan.nccl, plan.nccl_cumem, report.get(NCCL, ""), report.get(CUMEM, "")):
                    raise EngineRefused(f"engine {self.url}: {action}: {problem}")
            await self._leave_group()
            address = (plan.host, plan.port, plan.name, plan.workers, plan.timeout_s)
            try:
                rendezvous = await asyncio.to_thread(WeightRendezvous.connect, *address)
                rendezvous.ready("join", workers)  # for the server, which takes no part in the rendezvous
            except WeightGroupError as error:
                raise EngineError(f"engine {self.url}: {action}: {error}") from None
            self._group = _Group(plan, rendezvous, workers)
            try:
                for sender in range(len(plan.streams)):
                    await self._init_group(action, plan, sender)
            except BaseException:
                await self._leave_group()
                raise

    async def _init_group(self, action: str, plan: WeightGroupPlan, sender: int) -> None:
        body = {
            "master_address": plan.host,
            "master_port": plan.port,
            "rank_offset": 1 + plan.first_worker,
            "world_size": 1 + plan.workers,
            "group_name": plan.group(sender),
            "backend": plan.backend,
        }
        await self._calls.call(action, "/init_weights_update_group", self._update_timeout_s, body=body)

    async def receive_weights(self, group: str, step: str, version: int, mode: UpdateMode = "keep") -> float:
        action = f"receiving policy {version}"
        async with self._updates:
            deadline = time.monotonic() + self._update_timeout_s
            if self._group is None or self._group.plan.name != group:
                raise EngineRefused(f"engine {self.url}: {action}: it is not in weight group {group}; join it first")
            if mode == "wait":
                await self._wait_until_idle(action, deadline)
            async with self._paused(action, mode, deadline) as since:
                try:
                    async with self._updating(action, deadline):
                        await self._receive(action, self._group, step, version, deadline)
                except BaseException:
                    await self._leave_group()
                    raise
            return time.monotonic() - since

    async def _receive(self, action: str, group: _Group, step: str, version: int, deadline: float) -> None:
        plan = group.plan
        await self._calls.call(action, "/begin_weight_update", _left(deadline), body={})
        async with self._ending(action, "/end_weight_update"):
            group.rendezvous.ready(step, group.workers)
            for sender, number, bucket in plan.order():
                body = {
                    "names": [spec.name for spec in bucket],
                    "dtypes": [spec.dtype for spec in bucket],
                    "shapes": [spec.shape for spec in bucket],
                    "group_name": plan.group(sender),
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                where = f"{action}: bucket {number + 1} of {len(plan.streams[sender])} from sender {sender}"
                await self._calls.call(where, "/update_weights_from_distributed", _left(deadline), body=body)
        await self._calls.call(action, "/flush_cache", _left(deadline), body={})
        await self._label(action, str(int(version)))

    async def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for sender in range(len(group.plan.streams)):
            await self._clean_up("/destroy_weights_update_group", {"group_name": group.plan.group(sender)})

    async def _clean_up(self, route: str, body: dict[str, str]) -> None:
        """Send a request after a failure. Ignore errors, because a frozen server does not answer."""
        with contextlib.suppress(EngineError):
            await self._calls.call("cleaning up", route, CLEAN_UP_TIMEOUT_S, body=body)

    @contextlib.asynccontextmanager
    async def _updating(self, action: str, deadline: float) -> AsyncIterator[None]:
        """Label the weights as updating. The HTTP process reports the label while the scheduler is busy.

        If the context fails or is canceled, set a label that makes clients reject every token until an update succeeds.
        Loaded tensors stay loaded. SGLang reports every failure as a refusal, which would end the run, so a refusal
        becomes another `EngineError`.
        """
        try:
            await self._label(action, f"{UPDATING}{uuid4().hex[:8]}", _left(deadline))
            yield
        except BaseException as error:
            with contextlib.suppress(EngineError):
                await self._label(action, INCONSISTENT, CLEAN_UP_TIMEOUT_S)
            if isinstance(error, EngineRefused):
                raise EngineError(f"{error}; the weights may be incomplete, load them again") from error
            raise

    async def _present_label(self, action: str) -> str:
        try:
            return str((await self._calls.json(action, "/model_info"))["weight_version"])
        except KeyError as error:
            raise EngineError(f"engine {self.url}: {action}: its description lacks {error}") from None

    async def _label(self, action: str, label: str, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self._calls.call(action, "/update_weight_version", timeout_s, body=body)

    def _check_weights(self, action: str, path: Path) -> None:
        """Raise `EngineRefused` unless `path` has exactly the tensors of the run's model, or of an adapter for it.

        SGLang would load the tensors that it knows, keep the old values of missing tensors, and report success.
        """
        try:  # the server makes the same check, but only after it has paused
            inside_roots(str(path), [str(self._start_model), str(path.parent)])
        except RefusedPath as error:
            raise EngineRefused(f"engine {self.url}: {action}: {error}") from None
        if self._adapters is None:
            return self._check_manifest(action, lambda: Manifest.read(path))
        folded = self._adapters.model_copy(update={"alpha": float(self._adapters.r)})
        if problems := adapter_problems(path, read_hf_config(self._start_model), folded):
            raise EngineRefused(f"engine {self.url}: {action}: {'; '.join(problems)}")

    def _check_manifest(self, action: str, make: Callable[[], Manifest]) -> None:
        try:
            if self._manifest is None:
                self._manifest = Manifest.read(self._start_model)
            make().check_replaces(self._manifest)
        except BadWeights as error:
            raise EngineRefused(f"engine {self.url}: {action}: {error}") from None
        except UnreadableWeights as error:
            raise EngineError(f"engine {self.url}: {action}: {error}") from None

    async def _wait_until_idle(self, action: str, deadline: float) -> None:
        while time.monotonic() < deadline:
            reply = await self._calls.json(action, "/v1/loads", _left(deadline))
            if not any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in reply["loads"]):
                return
            await asyncio.sleep(IDLE_POLL_S)
        raise EngineTimeout(
            f"engine {self.url}: {action}: running requests did not end within {self._update_timeout_s:g} s "
            "(weight_sync.timeout_s); the old weights stay in use"
        )

    @contextlib.asynccontextmanager
    async def _paused(self, action: str, mode: UpdateMode, deadline: float) -> AsyncIterator[float]:
        """Pause generation inside the context. Yield the `time.monotonic()` at which the pause was requested."""
        # Retracted requests are prefilled again afterwards, so each later token is drawn from exactly the policy in
        # its tag. Requests paused in place would continue with keys and values from the old weights.
        body, since = {"mode": "abort" if mode == "abort" else "retract"}, time.monotonic()
        async with self._ending(action, "/continue_generation"):
            await self._calls.call(action, "/pause_generation", _left(deadline), body=body)
            yield since

    @contextlib.asynccontextmanager
    async def _ending(self, action: str, route: str) -> AsyncIterator[None]:
        """Call `route` at the end of the context. After a failure, do not wait long for a server that may be frozen."""
        try:
            yield
        except BaseException:
            await self._clean_up(route, {})
            raise
        await self._calls.call(action, route, body={})

    async def _ask_plugin(
        self, action: str, command: str, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> list[dict[str, str]]:
        """Return our plug-in's report for each worker, at least one.

        Raises `EngineIncompatible` if the plug-in is missing.
        """
        try:
            body = {"action": command, "selector": "target"}
            reply = await self._calls.json(action, "/weights_checker", timeout_s, body=body)
            reports = [{group: str(value) for group, value in rank["checksums"].items()} for rank in reply["ranks"]]
        except EngineRefused as error:
            if "Unsupported action" in str(error):
                raise EngineIncompatible(f"{error}: {NO_PLUGIN}") from None
            raise EngineError(str(error)) from None  # SGLang reports every failure this way, including out of memory
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"engine {self.url}: {action}: garbled reply: {error}") from None
        if not reports:
            raise EngineError(f"engine {self.url}: {action}: garbled reply: no worker reports")
        return reports


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)
