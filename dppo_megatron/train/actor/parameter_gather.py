"""Gathers new parameters over data-parallel ranks while the next update's forward pass runs.

After a distributed optimizer step each rank has new values only for its shard. Megatron gathers the shards at once, or
bucket by bucket just before a module needs them. Gathering by bucket is only possible between consecutive updates,
because engines, checkpoints and scoring need all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from megatron.core.distributed import DistributedDataParallel


class ParameterGather:
    """Controls when parameters of the wrapped `chunks` are gathered; does nothing if `overlap_param_gather` is off."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]):
        self._chunks = [chunk for chunk in chunks if chunk.use_forward_hook]
        self._outdated = False
        for chunk in self._chunks:
            chunk.disable_forward_pre_hook(param_sync=False)

    def after_update(self, *, trains_next: bool) -> None:
        """Gather new parameters after an optimizer step: now or, with `trains_next`, in the next update. Collective."""
        self._outdated = bool(self._chunks) and trains_next
        if not trains_next:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    def require_whole(self) -> None:
        """Raise RuntimeError between an update with `another_follows` and the next update."""
        if self._outdated:
            raise RuntimeError("parameters are gathered after the last update of a step; this update was not the last")

    @contextmanager
    def behind_forward(self) -> Iterator[None]:
        """Gather during an update's forward pass within the context; enter it once the gradient buffers are zero.

        Runs an all-gather per bucket if the parameters are outdated.
        """
        if not self._outdated:
            yield
            return
        with ExitStack() as stack:
            for chunk in self._chunks:
                # The fused head reads the weight outside a module's forward pass, where Megatron has no hook.
                stack.enter_context(chunk.module.register_forward_hook(partial(_finish, chunk)))
                chunk.enable_forward_pre_hook()
                stack.callback(chunk.disable_forward_pre_hook, param_sync=False)
            yield
        self._outdated = False


def _finish(chunk: DistributedDataParallel, *_: object) -> None:
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)
