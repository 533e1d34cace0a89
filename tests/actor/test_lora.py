"""LoRA: gradients, merged weights and PEFT's files are those of plain PyTorch and of PEFT, in every layout."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dppo_megatron.hf import ModelError, make_random_hf_model, open_weights, read_hf_config
from tests.actor.scenarios import checkpoint, lora
from tests.actor.scenarios.parts import of_each_sequence
from tests.support.actor_cases import QWEN3_MOE, sequences
from tests.support.actor_ranks import run_scenario

SP = {"tensor": 2, "sequence": True}
CASES: dict[str, tuple[int, str, tuple[str, ...] | None, dict[str, Any], dict[str, Any]]] = {
    "alone": (1, "qwen3", None, {}, {}),
    "fused_head": (1, "qwen3", None, {"logits": "fused"}, {}),
    "some_targets": (1, "qwen3", lora.SOME, {}, {}),
    "experts": (1, "qwen3_moe", None, {}, {}),
    "some_experts": (1, "qwen3_moe", lora.SOME_EXPERTS, {}, {}),
    "tensor_some": (2, "qwen3", lora.SOME, {}, {"tensor": 2}),
    "sequence": (2, "qwen3", None, {}, SP),
    "sequence_some": (2, "qwen3", lora.SOME, {"recompute": "full"}, SP),
    "pipeline_tied": (2, "tied", None, {"recompute": "full"}, {"pipeline": 2}),
    "pipeline_virtual": (2, "qwen3", None, {}, {"pipeline": 2, "virtual_pipeline": 2}),
    "context": (2, "qwen3", None, {}, {"context": 2}),
    "data_overlap": (2, "qwen3", None, {}, {"overlap": True}),
    "expert": (2, "qwen3_moe", None, {"recompute": "full"}, {"expert": 2}),
    "expert_sequence": (2, "qwen3_moe", None, {}, SP),
    "expert_whole": (2, "qwen3_moe", None, {}, {**SP, "expert": 2, "expert_tensor": 1}),
    "expert_cut_alone": (2, "qwen3_moe", None, {}, {"expert_tensor": 2}),
    "latent": (2, "deepseek", lora.LATENT, {}, SP),
    "delta_net": (1, "qwen3_5", lora.SOME_DELTA_NET, {}, {}),
    "delta_net_sequence": (2, "qwen3_5", lora.DELTA_NET, {"recompute": "full"}, SP),
}
FAST = ("sequence_some",)


def case(name: str):
    return name if name in FAST else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", list(map(case, CASES)))
def test_gradients_are_those_of_plain_pytorch(ranks, models, tmp_path, name):
    world, model, targets, changes, layout = CASES[name]
    got = run_scenario(ranks(world), lora.gradients, models, tmp_path, model, targets, changes, layout)
    expected = dense_reference(models / model, targets)
    assert got["gradients"].keys() == expected["gradients"].keys()
    for tensor in expected["gradients"]:
        torch.testing.assert_close(
            got["gradients"][tensor],
            expected["gradients"][tensor],
            rtol=2e-4,
            atol=2e-6,
            msg=lambda m, t=tensor: f"{t}: {m}",
        )
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    torch.testing.assert_close(got["logprobs"], expected["logprobs"], rtol=5e-6, atol=1e-5)
    for tensor, trained in expected["trained"].items():
        torch.testing.assert_close(
            got["trained"][tensor], trained, rtol=1e-3, atol=2e-4, msg=lambda m, t=tensor: f"{t}: {m}"
        )


def dense_reference(directory, targets) -> dict[str, Any]:
    """Differentiate the model of transformers with weights W + (alpha / r) B A by A and B."""
    from transformers import AutoModelForCausalLM

    from dppo_megatron.config.model import LoraConfig

    settings = LoraConfig(**lora.settings(targets)["lora"])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).requires_grad_(False)
    adapter = lora.random_adapter(read_hf_config(directory), settings)
    leaves = {name: value.requires_grad_() for name, value in adapter.items()}

    def losses():
        weights = merged(dict(model.named_parameters()), leaves, settings.alpha / settings.r)
        return of_each_sequence(lambda ids: torch.func.functional_call(model, weights, (ids,)).logits[0], sequences())

    found: dict[str, Any] = {}
    adam = torch.optim.AdamW(leaves.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    for update in range(2):
        adam.zero_grad()
        logprobs, loss = losses()
        loss.backward()
        if update == 0:
            found = {"loss": float(loss), "logprobs": logprobs}
            found["gradients"] = {name: leaf.grad.clone() for name, leaf in leaves.items()}
            found["grad_norm"] = float(torch.stack([g.norm() for g in found["gradients"].values()]).norm())
        adam.step()
    return {**found, "trained": {name: leaf.detach() for name, leaf in leaves.items()}}


def merged(
    weights: dict[str, torch.Tensor], leaves: dict[str, torch.Tensor], scaling: float
) -> dict[str, torch.Tensor]:
    """transformers keeps the experts of a layer in one tensor, gate above up."""
    out = dict(weights)
    for name, a in leaves.items():
        if ".lora_A." not in name:
            continue
        change = scaling * leaves[name.replace("lora_A", "lora_B")] @ a
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if f"{layer}.weight" in out:
            out[f"{layer}.weight"] = out[f"{layer}.weight"] + change
            continue
        prefix, expert, projection = layer.rsplit(".", 2)
        fused = f"{prefix}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"
        whole = out[fused]
        rows = len(change)
        start = rows if projection == "up_proj" else 0
        padded = torch.nn.functional.pad(change, (0, 0, start, whole.shape[1] - start - rows))
        one = torch.nn.functional.one_hot(torch.tensor(int(expert)), len(whole)).float()
        out[fused] = whole + one[:, None, None] * padded
    return out


GROUPED = {
    "fp32": (1, "fp32", {}),
    "bf16": (1, "bf16", {}),
    "tensor": (2, "fp32", SP),
    "expert": (2, "bf16", {"expert": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_experts_compute_what_they_do_one_after_the_other(ranks, models, tmp_path, name):
    world, dtype, layout = GROUPED[name]
    found = run_scenario(ranks(world), lora.grouped, models, tmp_path, dtype, layout)
    assert found["line"] == ["experts: grouped matrix products"]
    tolerance = 1e-6 if dtype == "fp32" else 1e-2
    assert all(found[counts] < tolerance for counts in ("uneven", "first_empty", "none"))
    assert [found[f"{counts}_calls"] for counts in ("uneven", "first_empty", "none")] == [6, 6, 0]
    assert found["storages"] == [[(1, 0)] * 2] * 2
    assert found["hooked"]
    assert found["same"]


@pytest.mark.slow
def test_experts_that_cannot_be_grouped_are_described(ranks, models, tmp_path):
    make_random_hf_model(tmp_path / "narrow", QWEN3_MOE | {"moe_intermediate_size": 6}, seed=1)
    for model, targets, why in (
        (str(tmp_path / "narrow"), None, "a row or a column of their weights is no multiple of 16 bytes"),
        ("qwen3_moe", lora.SOME_EXPERTS, "model.lora.targets names layers of some experts only"),
    ):
        (line,) = run_scenario(ranks(1), lora.described, models, tmp_path, model, targets)
        assert line == f"experts: one after the other, because {why}"
    assert run_scenario(ranks(1), lora.described, models, tmp_path, "qwen3", None) == []


@pytest.mark.parametrize(
    ("gpu", "dtype", "exact", "why"),
    [
        (None, "fp32", False, None),
        ((9, 0), "bf16", False, None),
        ((10, 3), "bf16", False, None),
        ((9, 0), "fp16", False, "needs bf16"),
        ((8, 0), "bf16", False, "compute capability 9 or 10"),
        ((12, 0), "bf16", False, "compute capability 9 or 10"),
        (None, "fp32", True, "engine.exact"),
    ],
)
def test_experts_are_grouped_where_torch_has_a_kernel(monkeypatch, gpu, dtype, exact, why):
    from dppo_megatron.actor import experts

    monkeypatch.setattr(experts, "this_gpu", lambda: gpu)
    config = SimpleNamespace(engine=SimpleNamespace(exact=exact), model=SimpleNamespace(dtype=dtype))
    reason = experts.why_sequential([], config)
    assert reason is None if why is None else why in reason


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_frozen_has_no_gradient_no_optimizer_state_and_no_copy_as_reference(ranks, models, tmp_path, world):
    for found in run_scenario(ranks(world), lora.frozen, models, tmp_path):
        assert found["gradients"] == found["own"]
        assert found["states"] <= 2 * found["own"] + 2000  # Adam's moments, and a step for each parameter
        assert found["unchanged"]
        assert found["no_gradient"]
        assert found["moved"] > 0.05
        assert found["reference"] == 0.0
        assert found["other_chunks"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_resume_is_bit_identical(ranks, models, tmp_path, world):
    results = run_scenario(ranks(world), lora.resume, models, tmp_path)
    assert len(results) == (2 if world == 1 else 9)
    for layout, (state, equal_bits, equal_losses) in results.items():
        assert state == {"step": 2}, layout
        assert equal_losses, layout
        assert equal_bits, layout


@pytest.mark.slow
def test_a_checkpoint_continues_in_other_layouts_and_no_other_run(ranks, models, tmp_path):
    directory = tmp_path / "checkpoints"
    expected = run_scenario(ranks(1), lora.continued, models, tmp_path / "one", {}, directory, 2)
    for layout in (SP, {"pipeline": 2}, {"expert": 2}, {"expert_tensor": 2}):
        got = run_scenario(ranks(2), lora.continued, models, tmp_path / "two", layout, directory, 2)
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5), layout
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), layout

    def why(settings: dict[str, Any], model: str = "qwen3_moe") -> str:
        given = directory, model, {"settings": settings}
        return run_scenario(ranks(1), checkpoint.refused, models, tmp_path / "other", *given)

    other = {"lora": {"r": lora.R, "alpha": 1.0}}
    assert "model.lora.alpha = 1.0: the checkpoint was saved with 6.0" in why(other)
    assert "model.lora.r = 0" in why({})
    shutil.copytree(models / "qwen3_moe", tmp_path / "exchanged")
    (file,) = (tmp_path / "exchanged").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.2.mlp.experts.3.up_proj.weight"][1, 1] += 1e-6
    save_file(tensors, file, metadata={"format": "pt"})
    assert "has changed since these adapters were trained" in why(lora.settings(), str(tmp_path / "exchanged"))
    with pytest.raises(ModelError, match="contains only adapters"):
        open_weights(directory / "step-000002", read_hf_config(models / "qwen3_moe"))


FILES = {
    "alone": (1, "qwen3", None, {}),
    "some": (2, "qwen3", lora.SOME, {"tensor": 2}),
    "pipeline": (2, "qwen3", None, {"pipeline": 2}),
    "experts": (2, "qwen3_moe", None, {"expert": 2}),
    "only_experts": (1, "only_experts", None, {}),
    "latent": (2, "deepseek", lora.LATENT, SP),
    "delta_net": (1, "qwen3_5", lora.SOME_DELTA_NET, {}),
}
BY_PEFT = (
    "alone",
    "some",
    "pipeline",
    "only_experts",
    "delta_net",
)  # its conversion of experts fails beside dense feed-forwards


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_saved_loaded_and_merged_adapters_give_the_same_log_probs(ranks, models, tmp_path, name):
    world, model, targets, layout = FILES[name]
    found = run_scenario(ranks(world), lora.files, models, tmp_path, model, targets, layout)
    assert float((found["filled"] - found["start"]).abs().max()) > 0.05
    assert torch.equal(found["loaded"], found["filled"])
    torch.testing.assert_close(found["merged"], found["filled"], rtol=5e-6, atol=1e-5)
    if name in BY_PEFT:
        torch.testing.assert_close(by_peft(tmp_path / "adapter", models / model), found["filled"], rtol=5e-6, atol=1e-5)


def by_peft(adapter, model) -> torch.Tensor:
    """Return the log-probs of the model that PEFT loads from the directory."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        return of_each_sequence(lambda ids: policy(ids).logits[0], sequences())[0]
