"""Form the process groups that broadcast weights from trainer ranks to engine workers, and synchronize both sides.

Both sides use this module; it depends only on torch. Each sender has a group. Rank 0 is the sender; the workers of all
engines follow, engine by engine. The weights go over gloo or NCCL, all other messages over a TCP store that the trainer
hosts.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.common.environment import environment

from .broadcast_plan import Backend

POLL_S = 0.0005  # while a bucket is being transferred
ABORT_POLL_S = 0.25  # polls of the store while a bucket is late


class WeightGroupError(RuntimeError):
    """The group cannot be used any more: a peer exited, timed out, or refused. Make a new group."""


class WeightRendezvous:
    """Connects to the store where senders and workers agree on every step before they transfer weights.

    A step begins when all workers have reported that they are ready. A single `abort` aborts the step for all peers.
    Peers that still wait for the step never start a collective, and peers within a collective abandon it.
    """

    def __init__(self, store: dist.TCPStore, plan_name: str, workers: int, timeout_s: float):
        self.port = store.port
        self._server = store
        self._store = dist.PrefixStore(plan_name, store)
        self._workers = workers
        self._timeout_s = timeout_s
        store.set_timeout(timedelta(seconds=timeout_s))

    @classmethod
    def host(cls, plan_name: str, workers: int, timeout_s: float, *, loopback: bool) -> WeightRendezvous:
        """Open the store on a free port; with `loopback`, only for this machine.

        The caller must keep the store open. All other parties, in this process too, `connect`.
        """
        address, dual_stack = "127.0.0.1" if loopback else "", not loopback and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual_stack else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, dualstack_ipv6=dual_stack, backlog=4096)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return cls(store, plan_name, workers, timeout_s)

    @classmethod
    def connect(cls, host: str, port: int, plan_name: str, workers: int, timeout_s: float) -> WeightRendezvous:
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        except Exception as error:
            raise WeightGroupError(f"cannot reach the trainer's store at {host}:{port}: {_brief(error)}") from error
        return cls(store, plan_name, workers, timeout_s)

    def ready(self, step: str, count: int = 1) -> None:
        """Report that `count` more workers are ready for `step`; the last report begins the step."""
        if self._store.add(f"{step}/ready", count) == self._workers:
            self._store.set(f"{step}/begin", "")

    def abort(self, step: str, reason: str) -> None:
        """Abort `step`; later reasons are ignored. Do nothing if the store has closed, because then no peer waits."""
        with suppress(Exception):
            first = self._store.compare_set(f"{step}/off", "", reason)
            self._store.set(f"{step}/begin", first.decode())

    def check(self, step: str) -> None:
        """Raise `WeightGroupError` if `step` was aborted, even after it began."""
        try:
            reason = self._store.get(f"{step}/off").decode() if self._store.check([f"{step}/off"]) else ""
        except Exception as error:
            raise WeightGroupError(f"{step}: the trainer's store does not answer: {_brief(error)}") from error
        if reason:
            raise WeightGroupError(f"{step}: aborted: {reason}")

    def wait(self, step: str) -> None:
        """Return when `step` begins. Raise `WeightGroupError` if it was aborted or did not begin in time."""
        try:
            reason = self._store.get(f"{step}/begin").decode()
        except Exception as error:
            raise WeightGroupError(f"{step}: not begun within {self._timeout_s:g} s: {_brief(error)}") from error
        if reason:
            raise WeightGroupError(f"{step}: aborted: {reason}")

    def channel(
        self, name: str, rank: int, backend: Backend, address: str, device: torch.device | None = None
    ) -> SenderGroup:
        """Join a sender's group `name` as `rank`, and return the group. Blocks until all members have joined.

        address: the address of this process. device: if given, the group's first byte is broadcast here, because NCCL
        connects only at the first transfer. An SGLang server does not expect that byte. Raises `WeightGroupError`.
        """
        # SGLang joins through torch.distributed, which adds these prefixes to the keys of a named group.
        store = dist.PrefixStore(name, self._server)
        store = dist.PrefixStore("cpu/" if backend == "gloo" else "cuda/", dist.PrefixStore(f"{name}/", store))
        try:
            group = new_group(store, rank, 1 + self._workers, backend, address, self._timeout_s)
            channel = SenderGroup(group, self, self._timeout_s)
            if device is not None:
                channel.finish(channel.broadcast(torch.zeros(1, dtype=torch.uint8, device=device)), "join")
        except Exception as error:
            raise WeightGroupError(f"group {name} did not form: {_brief(error)}") from None
        return channel


class SenderGroup:
    """Transfers weights in the process group with a sender and all workers.

    Gloo connections stay open as long as the group or an operation in the group is referenced. Only this object has
    such references, so `close` closes the connections, and peers that wait for this process fail at once. A running
    broadcast is an exception: gloo cannot end it before the timeout.
    """

    def __init__(self, group: Any, rendezvous: WeightRendezvous, timeout_s: float):
        self._group = group
        self.rendezvous = rendezvous
        self._works: dict[int, Any] = {}
        self._started = 0
        self._timeout = timedelta(seconds=timeout_s)

    def broadcast(self, tensor: Tensor) -> int:
        """Start the broadcast of `tensor` from rank 0; return a ticket for `finish`."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._timeout
        ticket, self._started = self._started, self._started + 1
        try:
            self._works[ticket] = self._group.broadcast([tensor], options)
        except Exception as error:
            raise WeightGroupError(_brief(error)) from None
        return ticket

    def finish(self, ticket: int, step: str) -> None:
        """Wait for a broadcast, on the GPU too.

        Raises `WeightGroupError` after the timeout, after a lost connection, or when `step` is aborted. The abort is
        needed because a frozen peer neither answers nor closes its connection.
        """
        work, started, checked = self._works[ticket], time.monotonic(), time.monotonic()
        try:
            while not work.is_completed() and time.monotonic() < started + self._timeout.total_seconds():
                time.sleep(POLL_S)
                if time.monotonic() > checked + ABORT_POLL_S:
                    self.rendezvous.check(step)
                    checked = time.monotonic()
            work.wait(timedelta(milliseconds=1))  # raises unless the broadcast has completed
        except WeightGroupError:
            raise
        except Exception as error:
            raise WeightGroupError(_brief(error)) from None
        del self._works[ticket]

    def close(self) -> None:
        if self._group is None:
            return
        self._group.abort()
        group, works = self._group, list(self._works.values())
        self._group, self._works = None, {}
        if not _completed(works):
            threading.Thread(target=_outlive, args=(group, works), daemon=True).start()


def _completed(works: Iterable[Any]) -> bool:
    return all(work.is_completed() for work in works)


def _outlive(_group: Any, works: list[Any]) -> None:
    """Keep a group until all operations have ended, because the destructor would block the caller until then."""
    while not _completed(works):
        time.sleep(ABORT_POLL_S)


def nccl_version() -> str:
    """Return the NCCL version that torch uses in this process; "" without NCCL."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, ImportError):
        return ""


def nccl_settings() -> tuple[str, str]:
    """Return the NCCL version and NCCL_CUMEM_ENABLE of this process; "" for a missing value.

    Without NCCL_CUMEM_ENABLE, NCCL chooses itself.
    """
    return nccl_version(), os.environ.get("NCCL_CUMEM_ENABLE", "")


def nccl_problem(trainer: str, trainer_cumem: str, engine: str, engine_cumem: str) -> str | None:
    """Return why NCCL would hang or fail in a group of trainer and engine with these `nccl_settings`, or None."""
    remedy = "or set weight_sync.transport to shared_storage"
    if trainer not in ("", engine):
        return (
            f"the trainer has NCCL {trainer}, the engine NCCL {engine or 'none'}, and a broadcast needs the same: "
            f"install engine and trainer with the same NCCL (nvidia-nccl), {remedy}"
        )
    if trainer and (trainer_cumem == "0") != (engine_cumem == "0"):
        return (
            f"NCCL_CUMEM_ENABLE is {trainer_cumem or 'not set'} for the trainer, {engine_cumem or 'not set'} for the "
            f"engine, and a broadcast needs the same value: export one for both (SGLang sets 0), {remedy}"
        )
    return None


def local_address(peer: str, port: int = 9) -> str:
    """Return this machine's address on the route to `peer`, where the peer can reach it. Sends no packet."""
    family, kind, _, _, target = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(target)
        address = sock.getsockname()[0]
        return "127.0.0.1" if address == "::1" else address  # a single address for everything on this machine


def new_group(store: dist.Store, rank: int, size: int, backend: Backend, address: str, timeout_s: float) -> Any:
    """Create a backend that is independent of the process's default group."""
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # torch's stub lacks it
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # The constructor reads this variable. Otherwise a watchdog would end this whole process when a peer is lost.
    with environment(TORCH_NCCL_BLOCKING_WAIT="1"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _brief(error: BaseException) -> str:
    """Return the message of a torch error, without source position, advice and stack."""
    text = re.sub(r"^\[\S+:\d+\]\s*", "", str(error).partition("\n")[0])
    return text.partition(". This is typically")[0] or type(error).__name__
