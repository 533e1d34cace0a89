"""The Actor on device cuda in each kind of layout: no mixed devices or dtypes, no wait in the loss, the same values."""

import operator
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dppo_megatron.objectives import build_objective
from dppo_megatron.objectives.presets import PRESETS
from tests.null_gpu.scenario import STEPS, Case
from tests.null_gpu.vllm_config import ROOT
from tests.support.flash import OPERATORS

DENSE = Case("dense")
MOE = Case("moe", "qwen3_moe")
MLA = Case("mla", "deepseek")
GLM = Case("glm", "glm")  # half of each head is rotated
DELTA = Case("delta", "delta", settings={"model": {"layers": "local"}})  # gated delta net
OSS = Case("oss", "oss")  # attention sinks and windows, experts with biases
# One that computes each prompt again and again, and one in which attention must see a mask, without FlashAttention.
LORA_WHOLE = Case("lora_whole", settings={"model": {"lora": {"r": 4}}}, prompts=False, steps=("logprobs", "update"))
LORA_MOE = Case("lora_moe", "qwen3_moe", settings={"model": {"lora": {"r": 4}}}, steps=(*STEPS, "all_waits"))
SEQUENTIAL = replace(LORA_MOE, name="lora_moe_sequential", sequential=True, steps=("logprobs", "update", "all_waits"))
FP32 = Case("fp32", settings={"model": {"dtype": "fp32"}}, prompts=True, kernels=True)
CASES = (
    DENSE,
    MOE,
    MLA,
    GLM,
    DELTA,
    OSS,
    Case("kernels", kernels=True),
    FP32,
    Case("fp16", settings={"model": {"dtype": "fp16"}}),
    Case("lora", settings={"model": {"lora": {"r": 4}}}, prompts=True),
    Case(
        "fused",
        settings={"model": {"logits": "fused", "recompute": "full"}, "optimizer": {"offload": True}},
        objectives=("dppo_topk_tv",),
    ),
    Case("te", te=True),
    Case("te_moe", "qwen3_moe", te=True),
    Case("te_mla", "deepseek", te=True),
    Case("te_glm", "glm", te=True),
    Case("delta_tensor", "delta", ranks=2, settings={"parallel": {"tensor": 2, "sequence": True}}),
    Case("oss_expert", "oss", ranks=2, settings={"parallel": {"expert": 2}}),
    Case("te_tensor", te=True, ranks=2, settings={"parallel": {"tensor": 2, "sequence": True}}),
    Case("tensor", ranks=2, settings={"parallel": {"tensor": 2, "sequence": True}}),
    Case("pipeline", ranks=2, settings={"parallel": {"pipeline": 2}}),
    Case("data", ranks=2, settings={"parallel": {"overlap": True}}),
    Case("context", ranks=2, settings={"parallel": {"context": 2}}),
    Case("expert", "qwen3_moe", ranks=2, settings={"parallel": {"expert": 2}}),
    LORA_MOE,
)
SMOKE = (DENSE, MOE)  # run in every shard
# Layouts and kinds of layers change values by rounding only.
SAME = {
    **dict.fromkeys(("tensor", "pipeline", "data", "context", "te", "te_tensor", "fp16"), DENSE),
    **dict.fromkeys(("expert", "te_moe"), MOE),
    "te_mla": MLA,
    "te_glm": GLM,
    "delta_tensor": DELTA,
    "oss_expert": OSS,
    "lora": LORA_WHOLE,
    "lora_moe": SEQUENTIAL,
}
FLASH = {f"aten::{name}" for name in OPERATORS}
# Functions of the compiled module that TransformerEngine's own layers call.
ASKED = ("generic_gemm", "rmsnorm_fwd", "rmsnorm_bwd", "fused_attn_fwd", "fused_attn_bwd", "multi_tensor_adam")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.smoke if case in SMOKE else (), id=case.name) for case in CASES]
)
def test_every_step_of_a_run(run_case, case):
    results = run_case(case)
    assert sum(found["export"] for found in results) > 20
    for found in results:
        assert "on cuda: " in found["layout"]
        assert found["offload"] > 100_000
        assert all(not u.skipped and u.grad_norm > 0 for u in found["updates"])
        if case.te:
            asked = [*ASKED, *(["te_general_grouped_gemm"] if case.model != "qwen3" else ["fused_rope_forward"])]
            assert all(found["te"].get(name, 0) > 0 for name in asked), found["te"]


@pytest.mark.parametrize(
    "case",
    [
        Case("objectives", objectives=tuple(PRESETS), waits_in=1, steps=("waits",)),
        Case(
            "objectives_context",
            ranks=2,
            settings={"parallel": {"context": 2}},
            objectives=tuple(name for name in PRESETS if build_objective(name).needs_sequences),
            waits_in=1,
            steps=("waits",),
        ),
    ],
    ids=lambda case: case.name,
)
def test_no_objective_waits_for_the_device(run_case, case):
    run_case(case)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in SAME], ids=lambda case: case.name)
def test_values_are_those_of_one_rank_with_local_layers(run_case, case):
    found, alone = run_case(case)[0], run_case(SAME[case.name])[0]
    if case.name not in ("data", "expert", "oss_expert"):  # their ranks score a share each
        assert (found["logprobs"] - alone["logprobs"]).abs().mean() < 0.04  # near a tie a router may choose otherwise
    for own, wanted in zip(found["updates"], alone["updates"], strict=True):
        assert own.loss == pytest.approx(wanted.loss, rel=0.03)
        assert own.grad_norm == pytest.approx(wanted.grad_norm, rel=0.1)


def test_attention_goes_to_a_fused_kernel(run_case):
    """16 bits use FlashAttention; fp32, which it lacks, torch's choice without cuDNN. Neither stores the scores."""
    efficient = {f"aten::_scaled_dot_product_efficient_attention{suffix}" for suffix in ("", "_backward")}
    for case in (c for c in CASES if not c.te and c.model != "oss"):  # attention with sinks is plain torch
        for found in run_case(case):
            attending = set(found["attending"])
            if case.model != "qwen3":  # routers have a softmax
                attending -= {"aten::_softmax", "aten::_softmax_backward_data"}
            assert attending == (efficient if case.name == "fp32" else FLASH), (case.name, found["attending"])


def test_experts_with_adapters_are_grouped_without_another_wait(run_case):
    grouped, sequential = run_case(LORA_MOE)[0], run_case(SEQUENTIAL)[0]
    assert (grouped["grouped"] > 0, sequential["grouped"]) == (True, 0)
    assert all(map(operator.le, grouped["all_waits"], sequential["all_waits"]))


def test_without_transformer_engine(models, tmp_path):
    """Megatron then takes torch's optimizer. In a process of its own: the ranks' has TransformerEngine imported."""
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "tests.null_gpu.scenario", str(models), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "'te': {}" in done.stdout
