"""vLLM's CUDA wheel accepts the commands of every example, and has the private names that our extension uses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.null_gpu.vllm_config import ROOT
from tests.support.actor_cases import write_config

EXAMPLES = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "examples").rglob("*.yaml")) if p.stem != "warmup"]
# DeepSeek-V3 in FP8, of which eight H100s cannot serve one: tensor parallel, or stages, over two nodes.
TWO_NODES = [
    f"examples/deepseek_v3/config.yaml slurm.gpu=h100-80 engine.nodes=2 engine.count=16 {layout}"
    for layout in (
        "engine.tensor_parallel=16 engine.expert_parallel=true",
        "engine.tensor_parallel=8 engine.pipeline_parallel=2 rollout.routing_replay=false",
    )
]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("vllm")
    write_config(directory / "model", max_position_embeddings=32768, hidden_size=256, head_dim=64)
    return examine(directory, EXAMPLES + TWO_NODES)


def examine(directory: Path, examples: list[str], before: str = "") -> dict:
    """before: Python that runs first in the process."""
    code = f"{before}\nfrom tests.null_gpu.vllm_config import main\nmain()"
    environment = {**os.environ, "NULL_GPU_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory), *examples],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((directory / "found.json").read_text())


@pytest.mark.parametrize("example", EXAMPLES + TWO_NODES)
def test_the_command_becomes_a_configuration_with_the_requested_values(found, example):
    made = found["examples"][example]
    assert "error" not in made, made
    assert made["problems"] == []
    assert made["v2"]
    assert made["async"]
    assert "FULL" in made["graphs"]
    assert made["worker"] == "vllm.v1.worker.gpu_worker.Worker"
    assert made["extension"].endswith("worker.WorkerExtension")
    assert made["transfer"] == "dppo"
    assert "processed_logprobs" in made["logprobs_mode"].lower()
    for name, wanted in made["wanted"].items():
        assert made[name] >= wanted if isinstance(wanted, bool) else made[name] == wanted, name


def test_nodes_of_an_engine_share_it_without_ray(found):
    assert all(found["examples"][example]["executor"] == "mp" for example in TWO_NODES)


def test_private_names_exist_and_take_our_arguments(found):
    assert found["absent"] == []
