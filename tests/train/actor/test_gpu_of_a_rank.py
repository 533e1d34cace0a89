"""Each rank of a node takes its own GPU, also with Slurm's bindings."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.train.actor.layout import LayoutError, check_own_gpus, local_gpu


@pytest.mark.parametrize(
    ("gpus", "environment", "index"),
    [
        pytest.param(8, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, 3, id="all GPUs of the node"),
        pytest.param(8, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 3, id="engines have the others"),
        pytest.param(1, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, 0, id="one bound to each task"),
        pytest.param(2, {"LOCAL_RANK": "1"}, 1, id="no LOCAL_WORLD_SIZE"),
        pytest.param(4, {}, 0, id="one process"),
    ],
)
def test_a_ranks_gpu(gpus, environment, index):
    assert local_gpu(gpus, environment) == index


@pytest.mark.parametrize("rank", [1, 3])
def test_too_few_gpus_for_the_ranks_of_a_node(rank):
    with pytest.raises(LayoutError, match=rf"LOCAL_RANK = {rank}: of 4 ranks on node \S+, this one sees 2 GPUs; show"):
        local_gpu(2, {"LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": "4"})


def errors(store: Path, places: list[tuple[str, str]]) -> list[str | None]:
    """Return the error of each rank at these nodes and GPUs."""

    def check(rank: int) -> str | None:
        try:
            own = dist.FileStore(str(store), len(places))
            check_own_gpus(Ranks(20, place=(own, rank, len(places))), *places[rank])
        except LayoutError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(check, range(len(places))))


def test_ranks_with_a_gpu_each_start(tmp_path):
    assert errors(tmp_path / "store", [("n1", "GPU-a"), ("n1", "GPU-b"), ("n2", "GPU-a")]) == [None] * 3


def test_ranks_that_share_a_gpu_are_named_on_every_rank(tmp_path):
    first, *others = errors(tmp_path / "store", [("n1", "GPU-a"), ("n2", "GPU-c"), ("n1", "GPU-a")])
    assert "ranks 0, 2 have GPU GPU-a of node n1: each rank needs its own" in first
    assert "slurm.srun_args" in first
    assert others == [first] * 2
