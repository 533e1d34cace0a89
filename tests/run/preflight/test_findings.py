"""The findings name the nodes at fault from the reports of their processes."""

import pytest

from dppo_megatron.run.preflight.findings import Reported, findings
from dppo_megatron.run.preflight.task import DONE, IMPORTED, LOOKED, READY, STARTED, STARTING

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


def test_a_problem_of_all_nodes_is_cured_by_no_other_node():
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


def test_a_fact_that_differs_from_most_nodes_is_found():
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
    ("name", "stage", "others", "text"),
    [
        ("rank-6", STARTING, READY, "no answer while starting"),
        ("rank-6", STARTED, READY, "no answer while importing torch"),
        ("rank-6", IMPORTED, READY, "no answer while looking at GPUs"),
        ("rank-6", LOOKED, READY, "no answer while waiting for the store"),
        ("rank-0", IMPORTED, LOOKED, "no answer while looking at GPUs"),  # the others wait for its store
        ("rank-0", LOOKED, LOOKED, "no answer while waiting for the store"),
    ],
)
def test_a_process_that_stays_behind(name, stage, others, text):
    tasks = reported(others)
    tasks[name].stage = stage
    ((said, nodes),) = found(tasks)
    assert said.startswith(f"{name}: {text}")
    assert nodes == (NODES[name],)


def test_a_store_that_no_other_node_reaches_is_at_fault_itself():
    tasks = reported(LOOKED)
    tasks["rank-0"].stage = tasks["rank-1"].stage = READY
    assert found(tasks) == [("the store of rank 0 there is reached from no other node", ("node0",))]


def test_a_process_that_ended_is_the_cause_of_the_rest():
    assert found(reported(LOOKED), {"node2": "Killed"}) == [("a process there ended: Killed", ("node2",))]


def leave(tasks, group, *names, **facts):
    for name in names or NAMED[group]:
        tasks[name].groups[group] = {"left": group, **facts}


@pytest.mark.parametrize(
    ("worked", "broken", "text", "nodes"),
    [
        ([], {"tensor 1": [2]}, "tensor 1 (rank-2, rank-3 on node1): rank-3 did not arrive; timed out", {"node1"}),
        # rank-4, the first of node2, fails with node3's and with node1's, which work with others.
        (["pairs 0", "other pairs 1"], {"pairs 1": [4, 6], "other pairs 0": [2, 4]}, "it did not end", {"node2"}),
        # No group tells the nodes apart.
        ([], {"world 0": range(8)}, "all arrived, and it did not end; timed out", set()),
        # rank-1 froze before tensor 0, so rank-0 never came to the world, where the others wait.
        (
            ["tensor 1", "pairs 1", "other pairs 0"],
            {"tensor 0": [0], "world 0": range(2, 8)},
            "group tensor 0 (rank-0, rank-1 on node0): rank-1 did not arrive",
            {"node0"},
        ),
        (["pairs 0", "other pairs 0"], {"tensor 1": [2, 3]}, "all arrived", {"node1"}),  # within a node
        (["tensor 0"], {"pairs 0": [0, 2]}, "all arrived", {"node0", "node1"}),  # a local group clears no node
    ],
)
def test_a_group_that_did_not_end_names_the_nodes_at_fault(worked, broken, text, nodes):
    tasks = reported(READY)
    for group in worked:
        leave(tasks, group, wrong=[])
    for group, ranks in broken.items():
        leave(tasks, group, *(f"rank-{rank}" for rank in ranks), error="timed out")
    assert {(text in said, *sorted(at)) for said, at in found(tasks)} == {(True, *sorted(nodes))}


def test_a_wrong_value_is_named_with_its_rank():
    tasks = reported()
    for group in NAMED:
        leave(tasks, group, wrong=[])
    leave(tasks, "world 0", wrong=[5])
    assert found(tasks) == [("group world 0: the values of rank-5 arrived wrong", ("node2",))]
