"""How weights travel from trainer ranks to engine workers by broadcast: the rendezvous, and what each bucket holds.

Used by both sides and in need of torch alone. One group exists for each trainer rank that sends weights (a sender):
rank 0 is the sender, the workers of all engines follow, engine by engine. The bytes go over gloo or NCCL, everything
else over one TCP store that the trainer hosts.
"""

from __future__ import annotations

import heapq
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Backend = Literal["gloo", "nccl"]
# Small buckets stay in memory the allocator already holds; on a GPU, large ones fill the network.
BUCKET_BYTES: dict[Backend, int] = {"gloo": 16 << 20, "nccl": 256 << 20}

POLL_S = 0.0005  # of a bucket under way
ABORT_POLL_S = 0.25  # of the store, by those whose bucket is late
_EXPERT = re.compile(r"\blayers\.(\d+)\..*\bexperts\.\d")


class WeightGroupError(RuntimeError):
    """The group is of no more use: a peer is gone, did not answer in time, or refused. Make a new one."""


class TensorSpec(NamedTuple):
    """One tensor in Hugging Face names."""

    name: str
    dtype: str  # as torch spells it: "bfloat16"
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


Bucket = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class WeightGroupPlan:
    """Everything a worker must know to join.

    `streams[s]` is, in order, what sender `s` sends in every update; workers take the buckets in `order`.
    """

    name: str  # unique to this group
    host: str  # of the store, as the engine reaches it
    port: int
    backend: Backend
    timeout_s: float  # of every single step
    workers: int  # of all engines
    streams: tuple[tuple[Bucket, ...], ...]
    first_worker: int = 0  # number of the engine's first worker among all

    def for_engine(self, host: str, first_worker: int) -> WeightGroupPlan:
        return replace(self, host=host, first_worker=first_worker)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WeightGroupPlan:
        streams = tuple(
            tuple(tuple(TensorSpec(n, d, tuple(s)) for n, d, s in bucket) for bucket in stream)
            for stream in value["streams"]
        )
        return cls(**{**value, "streams": streams})

    def group(self, sender: int) -> str:
        """Name of the group of that sender."""
        return f"{self.name}-{sender}"

    def order(self) -> Iterator[tuple[int, int, Bucket]]:
        """(sender, number in its stream, bucket) of every bucket, as all workers take them.

        Dense weights sender by sender, then experts layer by layer across senders: a worker may hold what it got of a
        layer until the layer is complete, and one sender has a few experts of every layer.
        """

        def with_keys(sender: int, stream: tuple[Bucket, ...]) -> Iterator[tuple[tuple[int, int, int], int, Bucket]]:
            for number, bucket in enumerate(stream):
                yield (expert_layer(bucket[0].name), sender, number), sender, bucket

        parts = (with_keys(sender, stream) for sender, stream in enumerate(self.streams))
        for (_, _, number), sender, bucket in heapq.merge(*parts, key=lambda part: part[0]):
            yield sender, number, bucket

    def tensors(self) -> Iterator[TensorSpec]:
        return (spec for stream in self.streams for bucket in stream for spec in bucket)


def expert_layer(name: str) -> int:
    """Number of the layer whose expert the tensor belongs to; -1 for all other tensors."""
    found = _EXPERT.search(name)
    return int(found[1]) if found else -1


def make_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """In the order of `specs`, as many to a bucket as fit; one larger than `bucket_bytes` is alone.

    Experts of another layer begin a bucket. So does a tensor that would not be aligned: they lie end to end.
    """
    buckets: list[list[TensorSpec]] = []
    filled, layer = 0, -1
    for spec in specs:
        full = filled + spec.nbytes > bucket_bytes or filled % getattr(torch, spec.dtype).itemsize
        before, layer = layer, expert_layer(spec.name)
        if not buckets or full or layer != before:
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += spec.nbytes
    return tuple(map(tuple, buckets))


def bucket_bytes(bucket: Bucket) -> int:
    return sum(spec.nbytes for spec in bucket)


def views(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor of `bucket` as views of its bytes, `flat` [bucket_bytes] uint8."""
    start = 0
    for spec in bucket:
        yield spec.name, flat[start : start + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        start += spec.nbytes


class Rendezvous:
    """The store at which senders and workers find each other and agree on every step before bytes flow.

    A step begins when all workers reported that they are ready, and is aborted for everybody by one `abort`: those that
    wait for it to begin never start a collective, and those within one give it up.
    """

    def __init__(self, store: dist.TCPStore, plan_name: str, workers: int, timeout_s: float):
        self.port = store.port
        self._server = store
        self._store = dist.PrefixStore(plan_name, store)
        self._workers = workers
        self._timeout_s = timeout_s
        store.set_timeout(timedelta(seconds=timeout_s))

    @classmethod
    def host(cls, plan_name: str, workers: int, timeout_s: float, *, loopback: bool) -> Rendezvous:
        """Opens the store on a free port, of the loopback interface alone where nobody is elsewhere.

        The first to open it keeps it; other parties, of this process too, `connect`.
        """
        listener = socket.socket()
        listener.bind(("127.0.0.1" if loopback else "", 0))
        listener.listen(4096)
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
    def connect(cls, host: str, port: int, plan_name: str, workers: int, timeout_s: float) -> Rendezvous:
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        except Exception as error:
            raise WeightGroupError(f"cannot reach the trainer's store at {host}:{port}: {_brief(error)}") from error
        return cls(store, plan_name, workers, timeout_s)

    def ready(self, step: str, count: int = 1) -> None:
        """Reports that `count` more workers are ready for `step`; the last one begins it."""
        if self._store.add(f"{step}/ready", count) == self._workers:
            self._store.set(f"{step}/begin", "")

    def abort(self, step: str, reason: str) -> None:
        self._store.set(f"{step}/off", reason)
        self._store.set(f"{step}/begin", reason)

    def check(self, step: str) -> None:
        """Raises `WeightGroupError` when `step` was aborted, also after it began."""
        try:
            reason = self._store.get(f"{step}/off").decode() if self._store.check([f"{step}/off"]) else ""
        except Exception as error:
            raise WeightGroupError(f"{step}: the trainer's store is gone: {_brief(error)}") from error
        if reason:
            raise WeightGroupError(f"{step}: aborted: {reason}")

    def wait(self, step: str) -> None:
        """Returns when `step` begins. Raises `WeightGroupError` when it was aborted or did not begin in time."""
        try:
            reason = self._store.get(f"{step}/begin").decode()
        except Exception as error:
            raise WeightGroupError(f"{step}: not begun within {self._timeout_s:g} s: {_brief(error)}") from error
        if reason:
            raise WeightGroupError(f"{step}: aborted: {reason}")

    def channel(
        self, name: str, rank: int, backend: Backend, address: str, device: torch.device | None = None
    ) -> Channel:
        """The group `name` of one sender, as its `rank`; `address` is this process's own. Blocks for all others.

        With a `device` its first byte is sent there and then, for NCCL connects no sooner; an SGLang server would not
        take it. Raises `WeightGroupError`.
        """
        # As torch.distributed prefixes a named group's keys, for SGLang makes its end by torch.
        store = dist.PrefixStore(name, self._server)
        store = dist.PrefixStore("cpu/" if backend == "gloo" else "cuda/", dist.PrefixStore(f"{name}/", store))
        try:
            group = _new_group(store, rank, 1 + self._workers, backend, address, self._timeout_s)
            channel = Channel(group, self, self._timeout_s)
            if device is not None:
                channel.finish(channel.broadcast(torch.zeros(1, dtype=torch.uint8, device=device)), "join")
        except Exception as error:
            raise WeightGroupError(f"group {name} did not form: {_brief(error)}") from None
        return channel


class Channel:
    """One sender and all workers.

    Gloo's connections live as long as anything refers to the group or to an operation on it. Nothing but this object
    does, so that `close` really closes them and whoever still waits for this process fails at once; unless a broadcast
    is under way, which gloo cannot end before its time-out.
    """

    def __init__(self, group: Any, rendezvous: Rendezvous, timeout_s: float):
        self._group = group
        self._rendezvous = rendezvous
        self._works: dict[int, Any] = {}
        self._started = 0
        self._timeout = timedelta(seconds=timeout_s)

    def broadcast(self, tensor: Tensor) -> int:
        """Starts the broadcast of `tensor` from rank 0; give the ticket to `finish`."""
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
        """Waits for a broadcast, on the GPU too.

        Raises `WeightGroupError` after the time-out, a lost connection, or when `step` is aborted: a peer that
        froze neither answers nor closes its connection.
        """
        work, started, checked = self._works[ticket], time.monotonic(), time.monotonic()
        try:
            while not work.is_completed() and time.monotonic() < started + self._timeout.total_seconds():
                time.sleep(POLL_S)
                if time.monotonic() > checked + ABORT_POLL_S:
                    self._rendezvous.check(step)
                    checked = time.monotonic()
            work.wait(timedelta(milliseconds=1))  # raises unless it has completed
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
    """Holds a group until nothing is under way: its destructor would wait for that, and the caller with it."""
    while not _completed(works):
        time.sleep(ABORT_POLL_S)


def local_address(peer: str, port: int = 9) -> str:
    """This machine's address on the route to `peer`, where a peer that we can reach can reach us. Sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(target)
        return sock.getsockname()[0]


def _new_group(store: dist.Store, rank: int, size: int, backend: Backend, address: str, timeout_s: float) -> Any:
    """A backend of its own: the process's default group, where there is one, knows nothing of it."""
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Read by the constructor: no watchdog then, which would end this whole process when a peer is lost.
    with _environment(TORCH_NCCL_BLOCKING_WAIT="1"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _brief(error: BaseException) -> str:
    """The message of an error of torch's, without source position, advice, and the stack that it carries along."""
    text = re.sub(r"^\[\S+:\d+\]\s*", "", str(error).partition("\n")[0])
    return text.partition(". This is typically")[0] or type(error).__name__
