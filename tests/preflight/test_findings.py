"""The findings name the nodes at fault from the reports of their processes."""

from __future__ import annotations

import pytest

from dppo_megatron.preflight.findings import Reported, findings
from dppo_megatron.preflight.task import DONE, IMPORTED, LOOKED, READY, STARTED, STARTING

NODES = {f"rank-{rank}": f"node{rank // 2}" for rank in range(8)}  # two on each of four
GROUPS = {"tensor 0": [0, 1], "tensor 1": [2, 3], "pairs 0": [0, 2], "pairs 1": [4, 6], "other pairs 0": [2, 4]}
GROUPS |= {"other pairs 1": [6, 0], "world 0": list(range(8))}
NAMED = {group: [f"rank-{rank}" for rank in ranks] for group, ranks in GROUPS.items()}


def reported(stage=DONE, **facts) -> dict[str, Reported]:
    """All of them alike."""
    return {name: Reported(node, stage, dict(facts)) for name, node in NODES.items()}


def found(tasks, ended=None) -> list[tuple[str, tuple[str, ...]]]:
    groups = {group: names for group, names in NAMED.items() if tasks.keys() >= set(names)}
    return [(finding.text, finding.nodes) for finding in findings(tasks, groups, ended or {})]


def test_nothing():
    assert found(reported(problems=[], same={"driver": "580"}, skew_s=-0.1)) == []


def test_what_all_nodes_have_is_cured_by_no_other_node():
    tasks = reported(problems=["driver 550: too old"], faults=["nvidia-smi timed out"])
    for finding in findings(tasks, NAMED, {}):
        assert finding.nodes == ("node0", "node1", "node2", "node3")
        assert finding.everywhere
    tasks["rank-0"].facts = tasks["rank-1"].facts = {}
    assert [finding.everywhere for finding in findings(tasks, NAMED, {})] == [False, False]


def test_another_node_may_help_the_only_one_with_a_fault_of_its_own():
    only = {"rank-0": Reported("node0", DONE, {"problems": ["driver 550: too old"], "faults": ["GPU 1 is missing"]})}
    assert [finding.everywhere for finding in findings(only, {}, {})] == [True, False]


def test_a_clock_is_a_warning():
    tasks = reported(skew_s=0.2)
    tasks["rank-2"].facts["skew_s"] = -61.0
    (finding,) = findings(tasks, NAMED, {})
    assert str(finding) == "warning: node1: its clock is -61 s from the driver's: times in logs mislead"


def test_what_differs_from_most_nodes():
    tasks = reported(same={"driver": "580"})
    tasks["rank-4"].facts["same"] = tasks["rank-5"].facts["same"] = {"driver": "570"}
    assert found(tasks) == [("driver: 570, on other nodes 580", ("node2",))]
    two = {
        name: Reported(node, DONE, {"same": {"driver": driver}})
        for name, node, driver in (("rank-0", "a", "580"), ("rank-1", "b", "570"))
    }
    assert found(two) == [("driver: 570, on other nodes 580", ("b",))]


def test_two_ranks_on_one_gpu():
    tasks = reported()
    for name, gpu in {"rank-0": "GPU-a", "rank-1": "GPU-a", "rank-2": "GPU-a", "rank-3": "GPU-b"}.items():
        tasks[name].facts["gpu"] = gpu
    ((text, nodes),) = found(tasks)
    assert text.startswith("rank-0 and rank-1 share GPU GPU-a;")
    assert nodes == ("node0",)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (STARTING, "no answer while starting"),
        (STARTED, "no answer while importing torch"),
        (IMPORTED, "no answer while looking at GPUs"),
        (LOOKED, "no answer while waiting for the store"),
    ],
)
def test_a_process_that_stays_behind(stage, text):
    tasks = reported(READY)
    tasks["rank-6"].stage = stage
    ((said, nodes),) = found(tasks)
    assert said.startswith(f"rank-6: {text}")
    assert nodes == ("node3",)


def test_where_rank_0_is_behind_the_others_wait_for_its_store():
    tasks = reported(LOOKED)
    tasks["rank-0"].stage = IMPORTED
    assert [nodes for _, nodes in found(tasks)] == [("node0",)]


def test_a_store_that_no_other_node_reaches_is_at_fault_itself():
    tasks = reported(LOOKED)
    tasks["rank-0"].stage = tasks["rank-1"].stage = READY
    assert found(tasks) == [("the store of rank 0 there is reached from no other node", ("node0",))]


def test_a_process_that_ended_is_the_cause_of_the_rest():
    assert found(reported(LOOKED), {"node2": "Killed"}) == [("a process there ended: Killed", ("node2",))]


def leave(tasks, group, *names, **facts):
    for name in names or NAMED[group]:
        tasks[name].groups[group] = {"left": group, **facts}


def test_a_rank_that_did_not_arrive_at_a_group():
    tasks = reported(READY)
    leave(tasks, "tensor 1", "rank-2", error="timed out")
    assert found(tasks) == [
        ("group tensor 1 (rank-2, rank-3 on node1): rank-3 did not arrive; timed out", ("node1",)),
    ]  # fmt: skip


def test_a_node_that_fails_in_both_of_its_pairs_is_at_fault():
    """rank-4, the first of node2, with node3's and with node1's; these work with others."""
    tasks = reported(READY)
    for group in ("pairs 0", "other pairs 1"):
        leave(tasks, group, wrong=[])
    for group in ("pairs 1", "other pairs 0"):
        leave(tasks, group, error="timed out")
    assert {nodes for _, nodes in found(tasks)} == {("node2",)}


def test_where_no_group_tells_the_nodes_apart_none_is_blamed():
    tasks = reported(READY)
    leave(tasks, "world 0", error="timed out")
    ((text, nodes),) = found(tasks)
    assert "all arrived, and it did not end; timed out" in text
    assert nodes == ()


def test_ranks_that_wait_for_a_stuck_rank_are_not_at_fault():
    """rank-1 froze before tensor 0, so rank-0 never came to the world, where the others wait."""
    tasks = reported(READY)
    leave(tasks, "tensor 0", "rank-0", error="timed out")
    for group in ("tensor 1", "pairs 1", "other pairs 0"):
        leave(tasks, group, wrong=[])
    leave(tasks, "world 0", *(f"rank-{rank}" for rank in range(2, 8)))
    ((text, nodes),) = found(tasks)
    assert text.startswith("group tensor 0 (rank-0, rank-1 on node0): rank-1 did not arrive")
    assert nodes == ("node0",)


def test_a_group_within_a_node_is_that_nodes():
    tasks = reported(READY)
    for group in ("pairs 0", "other pairs 0"):
        leave(tasks, group, wrong=[])
    leave(tasks, "tensor 1", error="timed out")
    assert [nodes for _, nodes in found(tasks)] == [("node1",)]


def test_a_wrong_value_names_whose_it_is():
    tasks = reported()
    for group in NAMED:
        leave(tasks, group, wrong=[])
    leave(tasks, "world 0", wrong=[5])
    assert found(tasks) == [("group world 0: the values of rank-5 arrived wrong", ("node2",))]
