"""The Actor on device cuda, in a dozen layouts: no device mixing, no wrong dtype, no wait in the loss, and right values."""

from __future__ import annotations

import pytest
import torch

from tests.null_gpu.scenario import Case

DENSE = Case("dense")
MOE = Case("moe", "qwen3_moe")
MLA = Case("mla", "deepseek")
CASES = (
    DENSE,
    Case("triton", triton=True),
    Case("fp16", settings={"model": {"dtype": "fp16"}}),
    Case("lora", settings={"model": {"lora": {"r": 4}}}),
    Case(
        "fused",
        settings={"model": {"logits": "fused", "recompute": "full"}, "optimizer": {"offload": True}},
        objectives=("dppo_topk_tv",),
        topk=True,
    ),
    Case("tensor", ranks=2, settings={"parallel": {"tensor": 2, "sequence": True}}),
    Case("pipeline", ranks=2, settings={"parallel": {"pipeline": 2}}),
    Case("data", ranks=2, settings={"parallel": {"overlap": True}}),
    Case("context", ranks=2, settings={"parallel": {"context": 2}}),
    MOE,
    Case("expert", "qwen3_moe", ranks=2, settings={"parallel": {"expert": 2}}),
    MLA,
)
# A layout changes no value, except by rounding.
ALONE = {"tensor": DENSE, "pipeline": DENSE, "data": DENSE, "context": DENSE, "expert": MOE}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_step_of_a_run(run_case, case):
    results = run_case(case)
    for found in results:
        assert "on cuda: " in found["layout"]
        assert found["offload"] > 100_000
        assert found["export"] > 20
        assert all(not u.skipped and u.grad_norm > 0 for u in found["updates"])


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ALONE], ids=lambda case: case.name)
def test_a_layout_computes_what_one_rank_does(run_case, case):
    found, alone = run_case(case)[0], run_case(ALONE[case.name])[0]
    if case.name != "data":  # whose ranks score a share each
        assert torch.allclose(found["logprobs"], alone["logprobs"], atol=0.1)
    for own, wanted in zip(found["updates"], alone["updates"], strict=True):
        assert own.loss == pytest.approx(wanted.loss, rel=0.02)
        assert own.grad_norm == pytest.approx(wanted.grad_norm, rel=0.05)
