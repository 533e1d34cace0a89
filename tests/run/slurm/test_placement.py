"""The nodes and command lines of steps, and rejected settings."""

import tempfile

import pytest

from dppo_megatron.config import ConfigError, save_resolved
from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.fleet.registry import ServiceTimeout
from dppo_megatron.run.checks.slurm import problems as slurm_problems
from dppo_megatron.run.checks.slurm import seconds_of
from dppo_megatron.run.slurm import placement, task
from dppo_megatron.run.slurm.allocation import Allocation
from dppo_megatron.run.slurm.step import srun_command, step_environment
from dppo_megatron.run.slurm.submit import prepare, scale_to_nodes
from dppo_megatron.run_dir import RunDir
from tests.support.slurm.config import config

ONE = Allocation("7", 0, (("a", "b", "c"),))
COLOCATED = {"engine": {"placement": "colocated"}}
HETEROGENEOUS = Allocation("7", 0, (("a", "b"), ("x",)))


@pytest.mark.parametrize(("allocation", "group", "node"), [(ONE, 0, "c"), (HETEROGENEOUS, 1, "x")])
def test_engines_on_nodes_of_their_own(allocation, group, node):
    plans = placement.server_plans(config(), allocation)
    assert [(p.name, p.nodes, p.group) for p in plans] == [(f"engine-{i}", (node,), group) for i in range(4)]
    assert [p.arguments[-1] for p in plans] == ["0", "2", "4", "6"]


SPANNING = {"engine": {"nodes": 2}}


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"world_size": 8}, ["a4", "b4", "a6", "b6"]),
        ({"sections": COLOCATED}, ["a0", "b0", "a2", "b2"]),
        ({"world_size": 8, "engines": 1, "tensor_parallel": 8, "sections": SPANNING}, ["ab4"]),
    ],
)
def test_engines_on_the_ranks_nodes_take_the_gpus_after_the_ranks_or_if_colocated_theirs(changes, places):
    shared = config(engine_nodes=0, **changes)
    assert slurm_problems(shared) == []
    plans = placement.server_plans(shared, Allocation("7", 0, (("a", "b"),)))
    assert ["".join((*p.nodes, p.arguments[-1])) for p in plans] == places


TEACHERS = {
    "large": {"path": "model", "tensor_parallel": 4},
    "small": {"path": "model", "sources": ["x"]},
    "away": {"urls": ["http://10.0.0.7:8000"], "sources": ["y"]},
}
TAUGHT = {"distillation": {"teachers": TEACHERS}}


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        # Behind engines on a shared node; on the node that no engine uses; behind engines on the ranks' GPUs.
        ({"gpus_per_node": 10, "engine_nodes": 0, "world_size": 8}, {"large": ("a", "6"), "small": ("b", "6")}),
        ({"engine_nodes": 2, "engines": 1, "tensor_parallel": 1}, {"large": ("d", "0"), "small": ("c", "1")}),
        ({"gpus_per_node": 12, "engine_nodes": 0, "sections": COLOCATED}, {"large": ("a", "8"), "small": ("b", "8")}),
    ],
)
def test_teachers_take_free_gpus_of_the_serving_nodes(changes, places):
    """Their steps read the config of their own run directory."""
    sections = changes.pop("sections", {}) | TAUGHT
    taught = config(engines=changes.pop("engines", 2), sections=sections, **changes)
    assert slurm_problems(taught) == []
    allocation = Allocation("7", 0, (tuple("abcd"),))
    plans = {plan.name.partition("-")[2]: plan for plan in placement.server_plans(taught, allocation) if plan.home}
    assert {name: (*plan.nodes, plan.arguments[-1]) for name, plan in plans.items()} == places
    for name, plan in plans.items():
        assert plan.arguments[:3] == ("engine", "--index", "0")
        command = srun_command(taught, "run/config.yaml", plan, allocation)
        assert command[-1] == f"run/teachers/{name}/config.yaml"
        assert f"--gpus-per-node={taught.slurm.gpus_per_node}" in command


def test_engines_over_two_nodes_each():
    """Their nodes follow one another; four GPUs on each of two nodes, twice."""
    spanning = config(engines=4, engine_nodes=4, tensor_parallel=8, sections=SPANNING)
    assert slurm_problems(spanning) == []
    plans = placement.server_plans(spanning, Allocation("7", 0, (tuple("abcdef"),)))
    places = [(plan.nodes, plan.arguments[-1], plan.tasks, plan.tasks_per_node) for plan in plans]
    pairs = [(("c", "d"), "0"), (("e", "f"), "0"), (("c", "d"), "4"), (("e", "f"), "4")]
    assert places == [(*pair, 2, 1) for pair in pairs]
    command = srun_command(spanning, "run/config.yaml", plans[1], ONE)
    assert {"--nodes=2", "--nodelist=e,f", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= {*command}


@pytest.mark.parametrize(("rank", "log"), [(0, "engine-3"), (1, "engine-3.1")])
def test_each_node_of_an_engine_runs_its_part(child_environments, monkeypatch, rank, log):
    spanning = config(engines=4, engine_nodes=4, tensor_parallel=8, sections=SPANNING)
    place = task.Task(rank=rank, size=2, local_rank=0, local_size=1, node="c", step="7.5-0")
    monkeypatch.setattr(task, "load_config", lambda path: spanning)
    monkeypatch.setattr(task.Task, "current", lambda: place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    task.run_task("engine", "config.yaml", resume=False, index=3, first_gpu=4)
    (child,) = child_environments
    assert child["name"] == log
    assert child["command"][-5:-1] == ["--node", str(rank), "--meeting", "engine-3-7.5-0"]
    assert child["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert "engine.host=10.0.0.1" in child["command"]  # the server's VLLM_HOST_IP, see tests/common/test_environment.py


def test_the_config_check_has_the_gpus_of_its_node_and_the_orchestrator_none():
    plans = placement.check_plan(config(), ONE), placement.job_plan(config(), ONE, resume=False).orchestrator
    assert [(plan.nodes, plan.tasks, plan.gpus_per_node) for plan in plans] == [(("a",), 1, 8), (("a",), 1, 0)]


def test_a_preflight_has_the_trainers_places_and_one_on_each_node_that_only_serves():
    trains, serves = placement.preflight_plans(config(), HETEROGENEOUS, "host,1")
    assert trains.arguments == ("trains", "--meeting", "host,1,17")
    assert (trains.nodes, trains.tasks, trains.gpus_per_node) == (("a", "b"), 16, 8)
    assert serves.arguments == ("serves", "--first-gpu", "0", "--meeting", "host,1,17")
    assert (serves.nodes, serves.tasks, serves.group) == (("x",), 1, 1)
    options = srun_command(config(), "c.yaml", serves, HETEROGENEOUS)
    assert "--kill-on-bad-exit=0" in options


def test_preflight_tasks_cover_engines_on_nodes_of_ranks_only_if_weights_are_broadcast():
    two = Allocation("7", 0, (("a", "b"),))
    shared = {"world_size": 8, "engine_nodes": 0}
    assert len(placement.preflight_plans(config(**shared), two, "")) == 1
    _, serves = placement.preflight_plans(
        config(**shared, sections={"weight_sync": {"transport": "broadcast"}}), two, ""
    )
    assert (serves.nodes, serves.tasks, serves.arguments[2]) == (("a", "b"), 2, "4")


def test_one_task_per_rank_on_the_first_nodes():
    plan = placement.trainer_plan(config(), ONE, resume=True)
    assert (plan.nodes, plan.tasks, plan.tasks_per_node, plan.gpus_per_node) == (("a", "b"), 16, 8, 8)
    command = srun_command(config(srun_args=["--export=ALL"]), "run/config.yaml", plan, ONE)
    layout = {"--distribution=block", "--ntasks=16", "--ntasks-per-node=8", "--nodelist=a,b", "--overlap"}
    assert {*layout, "--kill-on-bad-exit=1"} <= {*command}
    assert command[-4:] == ["slurm-task", "trainer", "--resume", "run/config.yaml"]
    assert not any(option.startswith("--het-group") for option in command)
    assert "--het-group=0" in srun_command(config(), "run/config.yaml", plan, HETEROGENEOUS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": "4:59"}, "slurm.signal_lead_s = 300: not less than slurm.time = 4:59"),
        ({"world_size": 15}, "slurm.trainer_nodes = 2: does not divide parallel.world_size = 15"),
        ({"world_size": 32}, "slurm.gpus_per_node = 8: a trainer node runs 16 ranks;"),
        ({"engines": 5}, "slurm.engine_nodes = 1: an engine node would serve on 10 GPUs and has 8"),
        ({"engine_nodes": 0}, "a trainer node runs 8 ranks and engines on 4"),
        ({"engine_nodes": 5}, "slurm.engine_nodes = 5: more than engine.count = 4"),
        ({"engine_nodes": 3, "sections": SPANNING}, "slurm.engine_nodes = 3: not a multiple of engine.nodes = 2"),
        ({"engine_nodes": 2, "tensor_parallel": 16, "engines": 2, "sections": SPANNING}, "would serve on 16 GPUs"),
        ({"engine_nodes": 0, "world_size": 8, "heterogeneous": True}, "slurm.heterogeneous = true: needs slurm.engine"),
        ({"engine_partition": "small"}, "slurm.engine_partition = small: needs slurm.heterogeneous = true"),
        ({"engine_gpus_per_node": 0}, "slurm.engine_gpus_per_node = 0: needs slurm.heterogeneous = true"),
        ({"sections": TAUGHT}, "an engine node would serve on 13 GPUs and has 8"),
        ({"engine_nodes": 0, "world_size": 8, "sections": TAUGHT}, "runs 4 ranks and engines and teachers on 8"),
        ({"sections": COLOCATED}, "slurm.engine_nodes = 1: with engine.placement = colocated"),
        ({"sections": COLOCATED, "engine_nodes": 0, "engines": 10}, "runs 8 ranks and, colocated, engines on 10"),
        ({"gpus_per_node": 0, "sections": {"model": {"fp8": "blockwise"}}}, "model.fp8 = blockwise: needs GPUs"),
        (
            {"heterogeneous": True, "engine_gpus_per_node": 0, "sections": {"engine": {"quantization": "fp8_block"}}},
            "engine.quantization = fp8_block: needs GPUs",
        ),
    ],
)
def test_refusals(changes, message):
    assert slurm_problems(config()) == []
    (violation,) = slurm_problems(config(**changes))
    assert message in violation


def test_gpus_that_are_not_used_are_noted():
    notes = []
    assert slurm_problems(config(gpus_per_node=16), notes=notes) == slurm_problems(config(), notes=notes) == []
    assert notes == ["slurm.gpus_per_node = 16: 8 GPUs of each trainer node are not used"]


def test_an_allocation_of_another_size_is_refused():
    assert slurm_problems(config(), ONE.sizes) == slurm_problems(config(), HETEROGENEOUS.sizes) == []
    (violation,) = slurm_problems(config(), Allocation("7", 0, (("a",),)).sizes)
    assert "the job has 1 nodes" in violation


def test_a_task_of_an_array_is_one_job_of_it(monkeypatch):
    """Slurm gives one task the array's number as its id: a query for that id returns all tasks."""
    monkeypatch.setattr("dppo_megatron.run.slurm.allocation.node_names", lambda nodes: (nodes,))
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}
    assert Allocation.current(environment).job_id == "7"
    environment |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert Allocation.current(environment).job_id == "7_3"


@pytest.mark.parametrize(
    ("granted", "gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_JOB_GPUS": "0,1,5,6"}, 4),
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "x"}, None),
    ],
)
def test_fewer_gpus_than_the_config_has_are_one_error_before_ranks_start(monkeypatch, granted, gpus):
    monkeypatch.setattr("dppo_megatron.run.slurm.allocation.node_names", lambda nodes: (nodes,))
    allocation = Allocation.current({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", **granted})
    assert allocation.gpus == gpus
    found = slurm_problems(config(gpus_per_node=8), (3,), allocation.gpus)
    wanted = "slurm.gpus_per_node = 8: Slurm granted 4 GPUs on the first node; make sbatch's "
    assert [problem[: len(wanted)] for problem in found] == ([wanted] if gpus else [])
    assert slurm_problems(config(gpus_per_node=8), (3,), 8) == []
    assert slurm_problems(config(gpus_per_node=0), (3,), 4) == []


def test_nodes_scale_ranks_and_engines():
    more = scale_to_nodes(config(), "4+2")
    assert (more.slurm.trainer_nodes, more.slurm.engine_nodes) == (4, 2)
    assert (more.parallel.world_size, more.engine.count) == (32, 8)
    assert scale_to_nodes(config(), "1").parallel.world_size == 8
    spanning = config(engines=1, engine_nodes=2, tensor_parallel=8, sections=SPANNING)
    assert scale_to_nodes(spanning, "2+6").engine.count == 3
    for wrong in ("0", "2+x", "two"):
        with pytest.raises(ConfigError, match="TRAINERS"):
            scale_to_nodes(config(), wrong)


def test_a_scaled_run_obeys_the_rules_between_settings(tmp_path):
    """64 ranks: more than the 32 sequences of an update."""
    file = tmp_path / "config.yaml"
    save_resolved(
        config(engine_nodes=0, engines=1, sections={"rollout": {"prompts_per_step": 4}}, gpus_per_node=16), file
    )
    with pytest.raises(ConfigError, match="data-parallel size 64 exceeds the 32 sequences of an update"):
        prepare(file, (), "8", resume=False)


def test_the_command_tells_trainers_from_engines(tmp_path, monkeypatch):
    save_resolved(config(), file := tmp_path / "config.yaml")
    monkeypatch.setattr("dppo_megatron.run.slurm.submit.check_config", lambda *_, **__: [])
    notes = prepare(file, (), "4", resume=False).notes
    assert f"--nodes 4: 4 nodes of the trainer, and {config().slurm.engine_nodes} of engines" in notes


def test_an_engine_takes_its_gpus_of_those_slurm_shows(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    assert task.engine_environment(config(), 1, 2)["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # as where Slurm does not constrain devices
    monkeypatch.setattr(task, "visible_devices", lambda: ["0", "1", "2", "3"])
    assert task.engine_environment(config(), 1, 2)["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(ExpectedError, match="GPUs are 4 to 5 of its node, and Slurm shows the step 4"):
        task.engine_environment(config(), 2, 4)
    monkeypatch.setattr(task, "visible_devices", lambda: ["0"])  # as under --gpus-per-task=1
    with pytest.raises(ExpectedError, match=r"GPUs are 2 to 3 of its node, .* shows the step 1; .*--gpus-per-task"):
        task.engine_environment(config(), 1, 2)


def test_options_of_the_batch_script_do_not_reach_its_steps():
    options = {"SLURM_TRES_PER_TASK": "gres:gpu:8", "SLURM_GPU_BIND": "none", "SLURM_DISTRIBUTION": "cyclic"}
    options |= {"SLURM_HINT": "nomultithread", "SLURM_EXACT": "1", "SLURM_THREADS_PER_CORE": "1", "SLURM_GPUS": "8"}
    assert step_environment(options | {"SLURM_JOB_ID": "7", "PATH": "x"}) == {"SLURM_JOB_ID": "7", "PATH": "x"}


def test_nodes_compile_kernels_apart(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (directory,) = task.kernel_cache_environment().values()
    assert directory.startswith(f"{tempfile.gettempdir()}/")
    assert directory.endswith("-7")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/mine")
    assert task.kernel_cache_environment() == {}


def test_the_address_is_that_of_the_interface():
    assert task.node_address(config(interface="lo")) == "127.0.0.1"
    with pytest.raises(ExpectedError, match=r"slurm.interface = ib7: no such interface .* it has .*lo"):
        task.node_address(config(interface="ib7"))


def test_engines_listen_beyond_their_node_only_for_others_of_the_run():
    assert task.engine_host(config(trainer_nodes=1, engine_nodes=0), "10.0.0.7") == "127.0.0.1"
    assert task.engine_host(config(trainer_nodes=1, engine_nodes=1), "10.0.0.7") == "10.0.0.7"
    assert task.engine_host(config(trainer_nodes=2, engine_nodes=0), "10.0.0.7") == "10.0.0.7"


def test_ranks_rendezvous_where_rank_0_wrote_and_nowhere_an_earlier_attempt_wrote(tmp_path):
    run = RunDir(tmp_path)

    def of_rank(rank, step):
        return task.Task(rank, size=2, local_rank=0, local_size=1, node="a", step=step)

    place = task.rendezvous(run, of_rank(0, "7.2-0"), "127.0.0.1", 1)
    assert task.rendezvous(run, of_rank(1, "7.2-0"), "127.0.0.1", 1) == place
    with pytest.raises(ServiceTimeout, match=r"waited 0 s \(slurm.start_timeout_s\) .*trainer-0.log"):
        task.rendezvous(run, of_rank(1, "7.2-1"), "127.0.0.1", 0.1)


def test_a_task_outside_srun_is_refused():
    with pytest.raises(ExpectedError, match="SLURM_NTASKS is not set"):
        task.Task.current({})


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("1-12", 129_600), ("1-12:30", 131_400), ("2-0:0:5", 172_805)],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(time, seconds):
    assert seconds_of(time) == seconds
    assert seconds_of("UNLIMITED") == seconds_of("0") == seconds_of("00:00:00") == float("inf")
