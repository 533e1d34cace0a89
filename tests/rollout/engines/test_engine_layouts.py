"""Command lines of engines that are larger than a GPU or a node, and which layouts are refused."""

import re
import shutil

import pytest
import torch

from dppo_megatron.hf import read_hf_config
from dppo_megatron.rollout.engines.kinds import KINDS
from dppo_megatron.rollout.engines.serving import Node
from dppo_megatron.run.checks import engine as rules
from dppo_megatron.weights.fingerprint import differing
from tests.rollout.engines.test_fingerprints import fingerprint as expected
from tests.rollout.engines.test_fingerprints import weights_of
from tests.support.actor_cases import GPT_OSS_SERVED, QWEN3
from tests.support.configs import make_config
from tests.support.engines import engine_config, make_model, running_server, with_engine
from tests.support.model_directories import edit_weights, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("layouts") / "a", seed=1)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("layouts") / "a", seed=1, experts=6)


def options(command: list[str], *names: str) -> list[str]:
    """Return the value after each of `names`: "" for an absent name, "set" for one without a value."""
    found = []
    for name in names:
        after = command[command.index(name) + 1 :] if name in command else None
        found.append("" if after is None else "set" if not after or after[0].startswith("--") else after[0])
    return found


NODES = ("--nnodes", "--node-rank")
VLLM = ("--master-addr", "--master-port", "--tensor-parallel-size", "--pipeline-parallel-size", "--headless")
SGLANG = ("--dist-init-addr", "--tp-size", "--ep-size")


@pytest.mark.parametrize(
    ("kind", "rank", "layout", "names", "expected", "alone"),
    [
        *(
            (
                "vllm",
                rank,
                {"tensor_parallel": 2, "pipeline_parallel": 2},
                (*VLLM, "--enable-expert-parallel"),
                ["10.0.0.1", "15000", "2", "2", headless, "set"],
                ["", "", "1", "", "", ""],
            )
            for rank, headless in ((0, ""), (1, "set"))
        ),
        ("sglang", 1, {"tensor_parallel": 2}, SGLANG, ["10.0.0.1:15000", "2", "2"], ["", "1", ""]),
    ],
)
def test_an_engine_on_two_nodes(model, kind, rank, layout, names, expected, alone):
    config = engine_config(model, kind=kind, nodes=2, expert_parallel=True, **layout)
    command = KINDS[kind].command(config, 8000, model, 0, Node(rank, "10.0.0.1", 15000))
    assert options(command, *NODES, *names) == ["2", str(rank), *expected]
    assert ("headless" in command[2]) == (kind == "vllm" and rank > 0)
    command = KINDS[kind].command(engine_config(model, kind=kind), 8000, model, 0)
    assert options(command, *NODES, *names) == ["", "", *alone]


@pytest.fixture(scope="module")
def gpt_oss(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("layouts") / "a"
    write_model(directory, {**QWEN3, **GPT_OSS_SERVED, "max_position_embeddings": 512}, torch.float32)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


def negated(model, directory):
    def negate(tensors):
        tensors.update({name: -tensor for name, tensor in tensors.items()})

    shutil.copytree(model, directory)
    edit_weights(directory, negate)
    return directory


@pytest.mark.engines
@pytest.mark.parametrize(("name", "by_expert"), [("mixture", True), ("gpt_oss", False)])
def test_workers_of_every_kind_report_the_fingerprint_of_their_weights(request, tmp_path, name, by_expert):
    """Two stages of two workers. With `by_expert` each has three of six experts: vLLM on CPUs can load, not multiply.

    vLLM's Qwen3-MoE has embedding and head on every stage. Its Qwen3 has a tied one on both: test_two_node_engine.py.
    Workers of a gpt-oss share every expert and the sinks of every layer.
    """
    start = request.getfixturevalue(name)
    other = negated(start, tmp_path / "b")
    config = engine_config(start, tensor_parallel=2, pipeline_parallel=2, expert_parallel=by_expert)
    config.engine.env["DPPO_ROOTS"] = "/"

    async def load(client):
        info, held = await client.info(), []
        for version, path in enumerate((other, start), 1):
            await client.load_weights(path, version, "abort")
            held.append(await client.weights_fingerprint())
        return info.workers, held

    with running_server(config, tmp_path / "log", version=0) as url:
        workers, held = with_engine(config, url, load)
    assert workers == 4
    for path, fingerprint in zip((other, start), held, strict=True):
        assert differing(expected(weights_of(path)), fingerprint) == []


STAGES = {"pipeline_parallel": 2, "nodes": 2}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": {"nodes": 2}}, "engine.nodes = 2: does not divide an engine's 1 GPUs"),
        (
            {"engine": {"kind": "sglang", **STAGES}},
            r"engine.pipeline_parallel = 2: SGLang numbers workers .*; set it to 1",
        ),
        (
            {"engine": STAGES, "rollout": {"routing_replay": True}},
            r"engine.pipeline_parallel = 2: vLLM returns no expert",
        ),
    ],
)
def test_layouts_that_are_refused(sections, message):
    base = {"run": {"dir": "run"}, "data": {"train": "t"}}
    assert not [*rules.problems(make_config(**base, engine=STAGES | {"tensor_parallel": 2}))]
    (problem,) = rules.problems(make_config(**base, **sections))
    assert re.match(message, problem), problem


def test_layouts_that_do_not_suit_the_model(model, mixture):
    dense, experts = read_hf_config(model), read_hf_config(mixture)

    def problems(hf, **engine):
        return [*rules.model_problems(engine_config(model, **engine), hf)]

    assert problems(dense, pipeline_parallel=4) == []
    (many,) = problems(dense, pipeline_parallel=5)
    assert many.startswith("engine.pipeline_parallel = 5: the model has 4 layers")
    (none,) = problems(dense, expert_parallel=True)
    assert none.startswith("engine.expert_parallel = true: 1 GPUs cannot share 0 experts")
    assert problems(experts, expert_parallel=True, tensor_parallel=2) == []
    (uneven,) = problems(experts, expert_parallel=True, tensor_parallel=4)
    assert "4 GPUs cannot share 6 experts evenly" in uneven
