"""Saves Megatron's torch_dist shards with torch's writer in this process, and loads them.

Every rank describes its shards. From all descriptions Megatron and torch derive which rank saves which shards, and
where in the checkpoint. Each save would send all descriptions to every rank. The result depends only on model and
layout, so only the first save gathers the descriptions. In later saves the ranks only verify, in a few bytes each, that
no shards have changed, and then write as before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dppo_megatron.common.ranks import Ranks

from .writer import Files


class ShardedSave:
    """Saves an actor's shards, any number of times."""

    def __init__(self) -> None:
        self._writer = _SaveInProcess()
        self._strategy: FullyParallelSaveStrategyWrapper | _SaveInProcess | None = None
        self._described = b""

    def save(self, state: dict[str, Any], directory: Path, files: Files) -> None:
        """Save in torch_dist format into an existing empty directory.

        Data-parallel ranks divide the shards that all of them have. All ranks must call this method. It returns when
        `files` has every part.
        """
        apply_factories(state)
        digest = _digest(state)
        strategy, self._strategy = self._strategy, None  # after an error the next save starts from scratch
        unchanged = strategy is not None and digest == self._described
        if not all(Ranks().gather(unchanged, "whether the shards are those of the last checkpoint")):
            strategy, unchanged = self._begin(), False
        self._writer.files = files
        with _torch_failures_as_errors():
            dist_checkpointing.save(
                state, str(directory), sharded_strategy=strategy, validate_access_integrity=not unchanged
            )
        self._strategy, self._described = strategy, digest

    def _begin(self) -> FullyParallelSaveStrategyWrapper | _SaveInProcess:
        self._writer = _SaveInProcess()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() == 1:  # no rank to share with, but Megatron would check this each time
            return self._writer
        return FullyParallelSaveStrategyWrapper(self._writer, group, do_cache_distribution=True)


def load_sharded(state: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Load torch_dist shards into the tensors that `state` describes. Collective."""
    with _torch_failures_as_errors():
        return dist_checkpointing.load(state, str(directory))


def _digest(state: dict[str, Any]) -> bytes:
    """Hash the descriptions of this rank's shards, not the contents."""
    shards = [repr(value.without_data()) for value in nested_values(state) if isinstance(value, ShardedBase)]
    return hashlib.sha256("\n".join(shards).encode()).digest()


@dataclass
class _SaveRecord:
    """Stores the plans and results of a save. `metadata` and `results_of_all` are empty except on rank 0."""

    plan: SavePlan  # made by this rank
    agreed: SavePlan  # returned by the coordinator
    results: list[WriteResult]
    metadata: Metadata
    results_of_all: list[list[WriteResult]]


class _SaveInProcess(torch_dist.TorchDistSaveShardedStrategy):
    """Writes the same shards in the same format as Megatron's save, in this process.

    Megatron's save forks writers and starts a manager process even if it waits for them. That takes seconds, needs
    psutil (without it the save hangs) and a guarded __main__, and forks a process that has communication threads.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.files = Files()
        self._record: _SaveRecord | None = None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        ranks = Ranks()
        shards, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        state = torch_dist.mcore_to_pyt_state_dict(shards, False)
        planner, writer = _Planner(self.files), _Writer(checkpoint_dir, self.files)
        record = self._record

        def as_before() -> bool:
            planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
            return planner.create_local_plan() == (record and record.plan)

        if all(ranks.on_every_rank(as_before, "the plan of a checkpoint")) and record is not None:
            _write_as_before(record, planner, writer, ranks)
            return
        plan = planner.plan
        torch.distributed.checkpoint.save(state, storage_writer=writer, planner=planner)
        self._record = _SaveRecord(plan, writer.plan, writer.results, writer.metadata, writer.results_of_all)


def _write_as_before(record: _SaveRecord, planner: _Planner, writer: _Writer, ranks: Ranks) -> None:
    action = "the checkpoint's shards to be written"

    def write() -> bool:
        old_results, record.results = record.results, writer.write(planner.finish_plan(record.agreed), planner).value()
        return record.results == old_results

    if not all(ranks.on_every_rank(write, action)):  # objects among the shards changed in size
        results_by_rank: list[Any] | None = [None] * ranks.size if ranks.rank == 0 else None
        torch.distributed.gather_object(record.results, results_by_rank)
        record.results_of_all = results_by_rank or []
    ranks.from_rank_zero(lambda: writer.finish(record.metadata, record.results_of_all), action)


class _Planner(torch_dist.MCoreSavePlanner):
    """Passes torch's writer memory that `files` may keep."""

    def __init__(self, files: Files):
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._files = files

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return self._files.hold(data) if isinstance(data, Tensor) else data


class _Writer(torch.distributed.checkpoint.FileSystemWriter):
    """Stores the plan and the results of a save.

    Ranks that have written wait for the others in the store, not in a collective with the training timeout.
    """

    plan: SavePlan
    results: list[WriteResult]

    def __init__(self, directory: Path, files: Files):
        super().__init__(directory, sync_files=False)
        self.fs = files
        self.metadata = Metadata({})
        self.results_of_all: list[list[WriteResult]] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = self.write(plan, planner)
            self.plan, self.results = plan, written.value()
            return written
        finally:
            Ranks().barrier("the checkpoint's shards to be written")

    def write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.metadata, self.results_of_all = metadata, results


@contextmanager
def _torch_failures_as_errors() -> Iterator[None]:
    """Raise OSError for torch's CheckpointException, which is not an `Exception` and contains all tracebacks."""
    try:
        yield
    except torch.distributed.checkpoint.CheckpointException as failed:
        texts = ((str(error), f"rank {rank}: {type(error).__name__}: ") for rank, (error, _) in failed.failures.items())
        # A text that was gathered from all ranks already names the rank.
        reasons = (text if text.startswith("rank ") else rank_prefix + text for text, rank_prefix in texts)
        raise OSError("; ".join(dict.fromkeys(reasons))) from failed
