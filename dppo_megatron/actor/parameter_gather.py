"""New parameters gathered over data-parallel ranks while the next update's forward pass runs.

After a step of the distributed optimizer each rank holds new values of its own shard alone. Megatron gathers them at
once, or bucket by bucket just before a module needs them. The second pays only between updates that follow one
another: whoever else reads weights (engines, checkpoints, scoring) needs them whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.core.distributed import DistributedDataParallel


class ParameterGather:
    """Of the wrapped `chunks` of one rank; where they gather at once (`overlap_param_gather` off) it does nothing."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]):
        self._chunks = [chunk for chunk in chunks if chunk.use_forward_hook]
        self._outdated = False
        for chunk in self._chunks:
            chunk.disable_forward_pre_hook(param_sync=False)

    def after_update(self, *, trains_next: bool) -> None:
        """After an optimizer step: gathers now, or where the next pass is an update's, then. Collective."""
        self._outdated = bool(self._chunks) and trains_next
        if not trains_next:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    def require_whole(self) -> None:
        """Raises RuntimeError between an update that announced another one and that one."""
        if self._outdated:
            raise RuntimeError("the last update was not the last of its step: parameters are not gathered yet")

    @contextmanager
    def behind_forward(self) -> Iterator[None]:
        """Around an update's forward and backward passes, after its gradient buffers were set to zero.

        Collectives: one all-gather per bucket, where one is outstanding.
        """
        if not self._outdated:
            yield
            return
        # The fused head reads its weight outside a module's forward pass, which no hook of Megatron's sees.
        handles = [chunk.module.register_forward_hook(_finish(chunk)) for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.enable_forward_pre_hook()
        try:
            yield
        finally:
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook(param_sync=False)
            for handle in handles:
                handle.remove()
        self._outdated = False


def _finish(chunk: DistributedDataParallel):
    def hook(*_: object) -> None:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    return hook
