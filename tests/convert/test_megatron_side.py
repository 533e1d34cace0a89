"""What is converted is what Megatron itself loads and what the trainer saves, in layouts other than the files'."""

from __future__ import annotations

import contextlib
import shutil
import socket
from pathlib import Path

import pytest
import yaml

from dppo_megatron.convert.layout import TargetLayout
from dppo_megatron.convert.processes import convert as convert_in_process
from dppo_megatron.convert.to_megatron import ToMegatron
from dppo_megatron.hf import ModelError
from tests.convert.helpers import edit_config, same_weights
from tests.convert.scenarios import Case, run
from tests.support.models import CONFIGS, EXPERT_FAMILIES

WITH_EXPERTS = (*EXPERT_FAMILIES, "all_experts")
MEGATRON = [
    *(Case(family, tp=2) for family in CONFIGS),
    Case("qwen3", pp=2),
    *(Case(family, ep=2) for family in WITH_EXPERTS),
]
ACTOR = [Case("qwen3", tp=2), Case("llama", pp=2), Case("qwen2"), Case("qwen3_moe", ep=2), Case("deepseek_v3", tp=2)]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory) -> Path:
    """Where the two ranks left their notes; the checkpoints they read are cut for other layouts than theirs."""
    root = tmp_path_factory.mktemp("ranks")
    (root / "models").symlink_to(models)
    for family in (*CONFIGS, "all_experts"):
        layout = TargetLayout(pipeline=2, tensor=2, expert=2 if family in WITH_EXPERTS else 1, expert_tensor=1)
        target = root / "megatron" / family
        convert_in_process(lambda f=family, t=target, cut=layout: ToMegatron(models / f, t, cut))
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in ACTOR]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        (root / "ports").write_text(" ".join(str(probe.getsockname()[1]) for probe in probes))
    run(MEGATRON, ACTOR, root)
    return root


@pytest.mark.parametrize("case", MEGATRON, ids=lambda case: case.name)
def test_megatron_loads_a_converted_checkpoint_at_other_sizes(ranks, case):
    assert [(ranks / f"{case.name}.{rank}").read_text() for rank in (0, 1)] == ["ok", "ok"]


@pytest.mark.parametrize("case", ACTOR, ids=lambda case: case.name)
def test_trainer_starts_from_it_and_its_checkpoint_becomes_hf_again(ranks, convert, tmp_path, case):
    assert [(ranks / f"actor-{case.name}.{rank}").read_text() for rank in (0, 1)] == ["ok", "ok"]
    saved = ranks / "runs" / case.name
    convert(
        "megatron-to-hf",
        saved / "checkpoints" / "step-000003",
        tmp_path / "a",
        "--template",
        ranks / "models" / case.family,
    )
    same_weights(saved / "exported", tmp_path / "a")
    same_weights(ranks / "models" / case.family, tmp_path / "a")
    # The run itself knows its model, and which checkpoint is the newest.
    (saved / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(ranks / "models" / case.family)}}))
    convert("megatron-to-hf", saved, tmp_path / "b")
    same_weights(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("case", "changes", "differing"),
    [
        (ACTOR[1], {"rope_parameters": LLAMA3}, {"rope_type", "rope_scaling"}),
        (ACTOR[3], {"num_experts_per_tok": 1, "norm_topk_prob": False}, {"moe.top_k", "moe.norm_topk_prob"}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_template_that_computes_something_else_is_refused(ranks, convert, tmp_path, case, changes, differing):
    template = Path(shutil.copytree(ranks / "models" / case.family, tmp_path / "template"))
    edit_config(template, **changes)
    saved = ranks / "runs" / case.name / "checkpoints" / "step-000003"
    with pytest.raises(ModelError) as error:
        convert("megatron-to-hf", saved, tmp_path / "a", "--template", template)
    assert {line.split(" = ")[0] for line in error.value.problems} == differing
