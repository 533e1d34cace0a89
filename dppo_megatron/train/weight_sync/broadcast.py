"""Publish by broadcast: each source rank sends its weights directly to all engines' workers.

vLLM's transfer over NCCL (https://github.com/vllm-project/vllm/tree/main/vllm/distributed/weight_transfer) is not used,
because an engine that dies within a bucket must not end the trainer or block the other engines
(`weights/process_group.py`). Reconsider this with the first measurement on GPUs.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import torch
from torch import Tensor

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config import Config
from dppo_megatron.hf import ModelError, export_weights
from dppo_megatron.hf.export import overflowing
from dppo_megatron.hf.turns import Turns
from dppo_megatron.rollout.engines.kinds import kind_of
from dppo_megatron.rollout.engines.protocol import Engine, EngineInfo
from dppo_megatron.train.actor import Actor
from dppo_megatron.weights.broadcast_plan import (
    BUCKET_BYTES,
    Backend,
    Bucket,
    TensorSpec,
    WeightGroupPlan,
    bucket_bytes,
    make_buckets,
    views,
)
from dppo_megatron.weights.fingerprint import add
from dppo_megatron.weights.process_group import (
    SenderGroup,
    WeightGroupError,
    WeightRendezvous,
    local_address,
    nccl_settings,
)

from .engine_thread import EngineThread
from .transport import Transport, WeightSyncError


class Broadcast(Transport):
    """Sends the weights through process groups that are made once, and again after a failure or when engines change.

    Source ranks are the ranks where `export_weights` yields: tensor-parallel rank 0 in every pipeline stage, and the
    first rank in each group that shards an expert. The engines receive their buckets in `WeightGroupPlan.order`.
    """

    def __init__(self, config: Config, actor: Actor, ranks: Ranks, engines: EngineThread | None):
        super().__init__(config, actor, ranks)
        self._engines = engines
        self._turns = Turns(ranks, "sends to engines")
        self._timeout_s = config.weight_sync.timeout_s
        # See `WeightRendezvous.channel`.
        self._first_byte = actor.layout.device if kind_of(config).own_receiver else None
        self._backend: Backend = "nccl" if actor.layout.device.type == "cuda" else "gloo"
        self._bucket_bytes = config.weight_sync.bucket_bytes or BUCKET_BYTES[self._backend]
        self._streams: tuple[tuple[Bucket, ...], ...] = ()  # buckets of each source rank
        self._sender: int | None = None  # this rank's index among the source ranks
        self._plan: WeightGroupPlan  # the last group's plan
        self._formed = False  # whether the last group exists and no step in it failed on this rank
        self._members: Sequence[str] = ()
        self._rendezvous: WeightRendezvous | None = None  # on rank 0, which hosts the store
        self._caller: WeightRendezvous | None = None  # rank 0's second connection, for aborting
        self._channel: SenderGroup | None = None
        self._step = 0

    def prepare(self, version: int) -> None:
        """Plan the buckets of every sender, once, because shapes do not change.

        Raises `ModelError` on every rank for weights beyond fp16, before any weight is sent.
        """
        if self._dtype == torch.float16:
            local_problems = overflowing(self._actor.model_chunks, self._actor.hf, self._dtype)
            problem_lists = self._ranks.gather(local_problems, "the weights to be checked")
            if problems := sorted({problem for rank_problems in problem_lists for problem in rank_problems}):
                raise ModelError(f"policy version {version}", problems)
        if not self._streams:
            specs = [TensorSpec.from_tensor(name, tensor) for name, tensor in self._export()]
            everyone = self._ranks.gather(make_buckets(specs, self._bucket_bytes), "the buckets of all source ranks")
            # The engines receive in every rank's export order: dense weights, then experts layer by layer.
            # A rank with a later bucket therefore never blocks a gather that the next bucket needs.
            senders = [rank for rank, buckets in enumerate(everyone) if buckets]
            self._streams = tuple(everyone[rank] for rank in senders)
            self._sender = senders.index(self._ranks.rank) if self._ranks.rank in senders else None
            self.nbytes = sum(bucket_bytes(bucket) for stream in self._streams for bucket in stream)

    def connect(self, engines: Mapping[str, EngineInfo]) -> None:
        self._step += 1
        joined = self._formed and self._members == tuple(engines)
        joined = joined and all(info.weight_group == self._plan.name for info in engines.values())
        if not all(self._ranks.gather(joined, "the state of their weight groups")):
            self.close()
            self._join(engines)

    async def receive(self, engine: Engine, version: int) -> float:
        return await engine.receive_weights(self._plan.name, self._step_name, version, self._config.rollout.on_update)

    def send(self) -> str | None:
        self.sent = {}
        exported, channel = self._export(), self._channel
        if self._sender is None or channel is None:
            deque(exported, maxlen=0)  # runs the export, because source ranks wait in the gathers
            return None
        stream = _BucketStream(channel, self._streams[self._sender], self._actor.layout.device, self._step_name)
        try:
            for name, tensor in exported:
                stream.add(name, tensor)
                if self._config.weight_sync.fingerprint:
                    add(self.sent, name, tensor)
            stream.finish()
        except WeightGroupError as error:
            # Abort the step for all ranks, because gloo does not end a running bucket elsewhere. The store stays open
            # until the next group, so that waiting peers read the abort there.
            problem = f"trainer rank {self._ranks.rank}: {error}"
            channel.rendezvous.abort(self._step_name, problem)
            channel.close()
            self._formed = False
            deque(exported, maxlen=0)  # runs the remaining export, because other ranks wait in the gathers
            return problem
        return None

    @property
    def _step_name(self) -> str:
        return f"update-{self._step}"

    def abort(self, reason: str) -> None:
        if self._caller is not None:
            self._caller.abort(self._step_name, reason)

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank fail at once."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._rendezvous = self._caller = None
        self._formed = False

    def _join(self, engines: Mapping[str, EngineInfo]) -> None:
        *offsets, workers = itertools.accumulate((info.workers for info in engines.values()), initial=0)
        first_workers = dict(zip(engines, offsets, strict=True))
        hosts = [_host(url) for url in engines]
        first = os.environ.get("MASTER_ADDR", "127.0.0.1")  # rank 0, at the address that the other ranks use
        name = self._ranks.from_rank_zero(lambda: f"weights-{uuid.uuid4().hex[:12]}", "the weight group's name")

        def host() -> int:
            loopback = all(local_address(peer).startswith("127.") for peer in [first, *hosts])
            self._rendezvous = WeightRendezvous.host(name, workers, self._timeout_s, loopback=loopback)
            return self._rendezvous.port

        port = self._ranks.from_rank_zero(host, "the weight group's store")
        nccl, cumem = nccl_settings() if self._backend == "nccl" else ("", "")
        connection = name, first, port, self._backend, self._timeout_s, workers
        self._plan = WeightGroupPlan(*connection, self._streams, nccl=nccl, nccl_cumem=cumem)
        self._members = tuple(engines)
        replies = None
        if self._engines is not None:  # rank 0
            # A connection that waits for the store is blocked until the answer, so aborts need a second connection.
            caller = self._caller = WeightRendezvous.connect("127.0.0.1", port, name, workers, self._timeout_s)

            async def invite(engine: Engine) -> None:
                try:
                    host = local_address(_host(engine.url))  # the address where the engine reaches this machine
                    plan = replace(self._plan, host=host, first_worker=first_workers[engine.url])
                    await engine.join_weight_group(plan)
                except Exception as error:
                    caller.abort("join", str(error))
                    raise

            replies = self._engines.start(lambda live: live.on(engines, invite))
        problems = []
        if self._sender is not None:
            try:
                rendezvous = self._rendezvous or WeightRendezvous.connect(first, port, name, workers, self._timeout_s)
                rendezvous.wait("join")
                self._channel = rendezvous.channel(
                    self._plan.group(self._sender), 0, self._backend, local_address(hosts[0]), self._first_byte
                )
            except WeightGroupError as error:
                problems = [f"trainer rank {self._ranks.rank}: {error}"]
        if replies is not None:
            problems = [str(reply) for reply in replies.result().values() if isinstance(reply, Exception)] or problems
        problems = [line for lines in self._ranks.gather(problems, "the weight group to form") for line in lines]
        if problems:
            self.close()
            raise WeightSyncError("the weight group did not form:\n  " + "\n  ".join(problems))
        self._formed = True

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(
            self._actor.model_chunks,
            self._actor.hf,
            self._dtype,
            bucket_bytes=self._bucket_bytes,
            quantization=self._quantization,
            before_gather=self._turns,
        )


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


class _BucketStream:
    """Packs tensors into the planned buckets; a bucket is sent while the next bucket fills."""

    def __init__(self, channel: SenderGroup, buckets: tuple[Bucket, ...], device: torch.device, step: str):
        self._channel = channel
        self._buckets = buckets
        self._step = step
        size = max(map(bucket_bytes, buckets))
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(2, len(buckets)))]
        self._tickets: list[int] = []  # tickets for sent buckets, in order
        self._flat = self._buffers[0]
        self._open: list[tuple[str, Tensor]] = []  # unfilled tensors in the current bucket, last first

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the current bucket, and send the bucket when it is full. Raises `WeightGroupError`."""
        if not self._open:
            self._next()
        place_name, place = self._open.pop()
        if (place_name, place.dtype, place.shape) != (name, tensor.dtype, tensor.shape):
            raise WeightGroupError(
                f"exported {TensorSpec.from_tensor(name, tensor)} where {TensorSpec.from_tensor(place_name, place)} "
                "was planned"
            )
        place.copy_(tensor)
        if not self._open:
            if not self._tickets:
                self._channel.rendezvous.wait(self._step)
            self._tickets.append(self._channel.broadcast(self._flat))

    def finish(self) -> None:
        """Wait until all buckets are sent. Raises `WeightGroupError`, also if a planned tensor is missing."""
        if self._open or len(self._tickets) != len(self._buckets):
            raise WeightGroupError(f"exported {len(self._tickets)} of {len(self._buckets)} planned buckets")
        for number in range(max(0, len(self._tickets) - 2), len(self._tickets)):
            self._wait(number)

    def _next(self) -> None:
        number = len(self._tickets)
        if number >= len(self._buckets):
            raise WeightGroupError(f"exported more than the {number} planned buckets")
        if number >= 2:
            self._wait(number - 2)
        bucket = self._buckets[number]
        self._flat = self._buffers[number % 2][: bucket_bytes(bucket)]
        self._open = list(views(self._flat, bucket))[::-1]

    def _wait(self, number: int) -> None:
        try:
            self._channel.finish(self._tickets[number], self._step)
        except WeightGroupError as error:
            bucket = self._buckets[number]
            where = f"bucket {number + 1} of {len(self._buckets)} (from {bucket[0].name})"
            raise WeightGroupError(f"{where}: {error}") from error
