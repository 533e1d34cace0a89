"""The checked groups are Megatron's."""

import pytest

from dppo_megatron.run.preflight.groups import process_groups
from tests.support.configs import make_config


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2},
        {"tensor": 2, "pipeline": 2, "context": 2},
        {"tensor": 2, "expert": 4, "expert_tensor": 1, "pipeline": 2},
        {"expert": 8},
    ],
)
def test_they_are_megatrons(sizes):
    from megatron.core.parallel_state import RankGenerator

    parallel = make_config(parallel={"world_size": 16, **sizes}).parallel
    p, etp = parallel, parallel.expert_tensor or parallel.tensor
    dense = {
        "tp": p.tensor,
        "cp": p.context,
        "pp": p.pipeline,
        "dp": 16 // (p.tensor * p.context * p.pipeline),
        "ep": 1,
    }
    experts = {"tp": etp, "ep": p.expert, "pp": p.pipeline, "dp": 16 // (etp * p.expert * p.pipeline), "cp": 1}
    dense, experts = (RankGenerator(order="tp-cp-ep-dp-pp", **layout) for layout in (dense, experts))
    axes = {"tensor": (dense, "tp"), "context": (dense, "cp"), "expert": (experts, "ep"), "data": (dense, "dp")}
    axes |= {"pipeline": (dense, "pp")}
    wanted = {
        f"{kind} {number}": ranks
        for kind, (generator, axis) in axes.items()
        for number, ranks in enumerate(generator.get_ranks(axis))
        if len(ranks) > 1
    }
    assert process_groups(parallel, 16) == wanted | {"world 0": list(range(16))}


def test_the_first_ranks_of_neighbouring_nodes_form_pairs_and_every_node_is_in_two_rounds():
    groups = process_groups(make_config(parallel={"world_size": 10}).parallel, 2)
    assert [group for group in groups.items() if "pairs" in group[0]] == [
        ("pairs 0", [0, 2]), ("pairs 1", [4, 6]), ("other pairs 0", [2, 4]), ("other pairs 1", [6, 8]),
    ]  # fmt: skip
    assert "pairs 0" not in process_groups(make_config(parallel={"world_size": 4}).parallel, 2)


def test_a_single_rank_has_no_group():
    assert process_groups(make_config(parallel={"world_size": 1}).parallel, 1) == {}
