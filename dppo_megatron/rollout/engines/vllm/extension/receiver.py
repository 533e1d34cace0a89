"""Receive weight broadcasts in a worker: join every sender's group and yield the buckets of each update."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dppo_megatron.weights.broadcast_plan import Bucket, WeightGroupPlan, bucket_bytes, views
from dppo_megatron.weights.process_group import SenderGroup, WeightGroupError, WeightRendezvous, local_address


class WeightReceiver:
    """Receives broadcasts for a weight group as the engine's worker number `worker`. Any error closes the receiver.

    All methods raise `WeightGroupError` that names the failed step.
    """

    def __init__(self, plan: WeightGroupPlan, worker: int, device: torch.device):
        self._plan = plan
        self._device = device
        self._channels: list[SenderGroup] = []
        self._rendezvous = WeightRendezvous.connect(plan.host, plan.port, plan.name, plan.workers, plan.timeout_s)
        self._rendezvous.ready("join")
        self._rendezvous.wait("join")
        rank, address = 1 + plan.first_worker + worker, local_address(plan.host, plan.port)
        try:
            for sender in range(len(plan.streams)):
                self._channels.append(self._rendezvous.channel(plan.group(sender), rank, plan.backend, address, device))
        except BaseException:
            self.close()
            raise

    def receive(self, step: str) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield an iterator of (name, tensor) for each bucket, once all workers are ready for `step`.

        The next bucket is transferred while the caller uses the current bucket. Buckets do not share memory, because a
        loader may keep views until a layer is complete.
        """
        try:
            self._rendezvous.ready(step)
            self._rendezvous.wait(step)
            yield from self._buckets(step)
        except BaseException:
            self.close()  # the sender and the other workers then fail at once instead of waiting
            raise

    def _buckets(self, step: str) -> Iterator[Iterator[tuple[str, Tensor]]]:
        coming = (self._start(*place) for place in self._plan.order())
        arriving = next(coming, None)
        while arriving is not None:
            (sender, number, bucket, flat, ticket), arriving = arriving, next(coming, None)
            try:
                self._channels[sender].finish(ticket, step)
            except WeightGroupError as error:
                where = f"bucket {number + 1} of {len(self._plan.streams[sender])} from sender {sender}"
                raise WeightGroupError(f"{where} (from {bucket[0].name}): {error}") from None
            yield views(flat, bucket)

    def _start(self, sender: int, number: int, bucket: Bucket) -> tuple[int, int, Bucket, Tensor, int]:
        flat = torch.empty(bucket_bytes(bucket), dtype=torch.uint8, device=self._device)
        return sender, number, bucket, flat, self._channels[sender].broadcast(flat)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels = []
