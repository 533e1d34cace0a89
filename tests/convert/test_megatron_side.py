"""Megatron and the trainer load converted checkpoints in layouts other than the files'."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dppo_megatron.convert.job import convert as convert_in_process
from dppo_megatron.convert.layout import TargetLayout
from dppo_megatron.convert.to_megatron import ToMegatron
from dppo_megatron.hf import ModelError
from tests.convert.scenarios import LLAMA3, Case, load_with_megatron, save_with_actor
from tests.support.model_directories import edit_config, same_weights
from tests.support.models import CONFIGS, EXPERT_FAMILIES

WITH_EXPERTS = (*EXPERT_FAMILIES, "all_experts")
MEGATRON = [
    *(Case(family, tp=2) for family in CONFIGS if family != "gpt_oss"),  # its experts cannot be sharded
    Case("qwen3", pp=2),
    *(Case(family, ep=2) for family in (*WITH_EXPERTS, "gpt_oss")),
]
ACTOR = [Case("qwen3", tp=2), Case("llama", pp=2), Case("qwen2"), Case("qwen3_moe", ep=2), Case("deepseek_v3", tp=2)]


@pytest.fixture(scope="module")
def root(models, tmp_path_factory) -> Path:
    """models/ and megatron/, checkpoints that are sharded for other layouts than those of the cases."""
    root = tmp_path_factory.mktemp("ranks")
    (root / "models").symlink_to(models)
    for family in (*CONFIGS, "all_experts"):
        layout = TargetLayout(pipeline=2, tensor=2, expert=2 if family in WITH_EXPERTS else 1, expert_tensor=1)
        target = root / "megatron" / family
        convert_in_process(lambda f=family, t=target, to=layout: ToMegatron(models / f, t, to))
    return root


@pytest.fixture(scope="module")
def saved(ranks, root) -> Callable[[Case], Path]:
    """f(case) -> runs/CASE below root, where the actor saved it; each case is run once."""

    @functools.cache
    def run(case: Case) -> Path:
        ranks(2).run(save_with_actor, case=case, root=root)
        return root / "runs" / case.name

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", MEGATRON, ids=lambda case: case.name)
def test_megatron_loads_a_converted_checkpoint_at_other_sizes(ranks, root, case):
    ranks(2).run(load_with_megatron, case=case, root=root)


@pytest.mark.parametrize("case", ACTOR, ids=lambda case: case.name)
def test_trainer_starts_from_it_and_its_checkpoint_becomes_hf_again(root, saved, convert, tmp_path, case):
    run = saved(case)
    convert(
        "megatron-to-hf",
        run / "checkpoints" / "step-000003",
        tmp_path / "a",
        "--template",
        root / "models" / case.family,
    )
    same_weights(run / "exported", tmp_path / "a")
    same_weights(root / "models" / case.family, tmp_path / "a")
    # The run itself knows its model, and which checkpoint is the newest.
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"path": str(root / "models" / case.family)}}))
    convert("megatron-to-hf", run, tmp_path / "b")
    same_weights(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("case", "changes", "differing"),
    [
        (ACTOR[1], {"rope_parameters": LLAMA3}, {"rope_type", "rope_scaling"}),
        (ACTOR[3], {"num_experts_per_tok": 1, "norm_topk_prob": False}, {"moe.top_k", "moe.norm_topk_prob"}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_template_that_computes_something_else_is_refused(root, saved, convert, tmp_path, case, changes, differing):
    template = Path(shutil.copytree(root / "models" / case.family, tmp_path / "template"))
    edit_config(template, **changes)
    checkpoint = saved(case) / "checkpoints" / "step-000003"
    with pytest.raises(ModelError) as error:
        convert("megatron-to-hf", checkpoint, tmp_path / "a", "--template", template)
    assert {line.split(" = ")[0] for line in error.value.problems} == differing
