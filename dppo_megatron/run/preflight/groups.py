"""Lists the process groups to check: the layout's groups, without Megatron, and the broadcast group."""

from __future__ import annotations

import numpy as np

from dppo_megatron.config.schema import Config, ParallelConfig

PAIRS, WEIGHTS = "pairs", "weights"
KEEPER = "rank-0"  # hosts the store at which all processes meet


def checked_groups(config: Config, per_node: int, size: int) -> dict[str, list[str]]:
    """Return the member names of each group, in the order of checks.

    size: number of all processes, including serving nodes. Example: {"tensor 0": ["rank-0", "rank-1"], ..., "weights":
    ["rank-0", "serving-0"]}.
    """
    groups = process_groups(config.parallel, per_node)
    named = {group: [f"rank-{rank}" for rank in ranks] for group, ranks in groups.items()}
    serving = [f"serving-{number}" for number in range(size - config.parallel.world_size)]
    if serving and config.weight_sync.transport == "broadcast":
        named[WEIGHTS] = [KEEPER, *serving]
    return named


def process_groups(parallel: ParallelConfig, per_node: int) -> dict[str, list[int]]:
    """Return the groups that have several ranks, in the order of checks.

    World 4 with tensor 2: {"tensor 0": [0, 1], "tensor 1": [2, 3], "data 0": [0, 2], "data 1": [1, 3], ...}.
    Beyond two nodes, pairs of neighboring nodes come first: a node that fails in both pairs is at fault.
    """
    p, ranks = parallel, np.arange(parallel.world_size)
    dense = ranks.reshape(p.pipeline, -1, p.context, p.tensor)
    experts = ranks.reshape(p.pipeline, -1, p.expert, p.expert_tensor or p.tensor)
    axes = {"tensor": (dense, 3), "context": (dense, 2), "expert": (experts, 2), "data": (dense, 1)}
    axes["pipeline"] = (dense, 0)
    kinds = {kind: np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]) for kind, (grid, axis) in axes.items()}
    if len(first := ranks[::per_node]) > 2:
        even = len(first) // 2 * 2
        shifted_pairs = np.roll(first, -1)[:even].reshape(-1, 2)
        kinds = {PAIRS: first[:even].reshape(-1, 2), f"other {PAIRS}": shifted_pairs} | kinds
    kinds["world"] = ranks[None]
    return {
        f"{kind} {number}": members
        for kind, groups in kinds.items()
        for number, members in enumerate(groups.tolist())
        if len(members) > 1
    }
