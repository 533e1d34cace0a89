"""LoRA: gradients are those of plain PyTorch in every layout, and grouped experts compute as single ones."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dppo_megatron.hf import make_random_hf_model, read_hf_config
from tests.support.actor_cases import QWEN3_MOE, sequences
from tests.support.actor_ranks import Rank, on_ranks, run_scenario
from tests.train.actor.scenarios import lora
from tests.train.actor.scenarios.parts import of_each_sequence

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


def grouped_experts(rank: Rank, dtype: str, layout: dict[str, Any]) -> None:
    """Values and gradients of one layer's grouped experts are those of one after the other.

    Before and after an offload and a checkpoint, their weights share one storage.
    """
    from megatron.core.transformer.moe.experts import SequentialMLP

    tolerance = 1e-6 if dtype == "fp32" else 1e-2
    with rank.actor("qwen3_moe", settings=lora.settings(dtype=dtype), **layout) as actor:
        lora.fill(actor)
        assert [line for line in actor.describe() if line.startswith("experts")] == ["experts: grouped matrix products"]
        experts = actor.model_chunks[0].decoder.layers[-1].mlp.experts
        adapters = [p for name, p in experts.named_parameters() if ".lora." in name]
        hooked: set[Any] = set()  # Megatron gathers parameters in hooks like these
        for adapter in (module for name, module in experts.named_modules() if name.endswith(".lora")):
            adapter.register_forward_pre_hook(lambda adapter, _: hooked.add(adapter))
        generator = torch.Generator().manual_seed(3)
        uneven = torch.arange(len(experts.local_experts)).flip(0) ** 2  # the last one has no tokens
        for counts in (uneven, uneven.flip(0), 0 * uneven):
            tokens = int(counts.sum())
            x, upstream = (torch.randn(2, tokens, 32, generator=generator)).to(adapters[0].dtype)
            probs = torch.rand(tokens, generator=generator).requires_grad_()
            wanted, got = [], []
            with mock.patch("torch.nn.functional.grouped_mm", wraps=torch.nn.functional.grouped_mm) as product:
                for values, call in ((wanted, partial(SequentialMLP.forward, experts)), (got, experts)):
                    hooked.clear()
                    out, bias = call(x.requires_grad_(), counts, probs)
                    values += [out, *torch.autograd.grad(out, [x, probs, *adapters], upstream)]
                    assert bias is None
            for mine, theirs in zip(got, wanted, strict=True):
                assert (mine - theirs).norm() < tolerance * theirs.norm().clamp_min(1e-9), counts
            assert product.call_count == (6 if tokens else 0)
            assert len(hooked) * 2 == len(adapters)
        assert _storages(experts) == [(1, 0)] * 2
        before = [p.detach().clone() for p in experts.parameters()]
        with actor.offloaded():
            pass
        actor.save_checkpoint(rank.directory / "grouped", 1, {}, keep=1)
        for weight in experts.parameters():
            weight.data.zero_()
        actor.load_checkpoint(rank.directory / "grouped")
        assert _storages(experts) == [(1, 0)] * 2
        assert all(map(torch.equal, before, experts.parameters()))


def _storages(experts: Any) -> list[tuple[int, int]]:
    """Return for each projection the number of storages of its weights, and their bytes beyond the weights."""
    out = []
    for name in ("linear_fc1", "linear_fc2"):
        weights = [getattr(expert, name).weight for expert in experts.local_experts]
        storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
        out.append((len(storages), sum(storages.values()) - sum(w.nbytes for w in weights)))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "dtype", "layout"),
    [(1, "fp32", {}), (1, "bf16", {}), (2, "fp32", SP), (2, "bf16", {"expert": 2})],
    ids=["fp32", "bf16", "tensor", "expert"],
)
def test_grouped_experts_agree_with_sequential_experts(ranks, models, tmp_path, world, dtype, layout):
    run_scenario(ranks(world), grouped_experts, models, tmp_path, dtype, layout)


def assert_described(rank: Rank, model: str, targets: tuple[str, ...] | None, *lines: str) -> None:
    with rank.actor(model, settings=lora.settings(targets)) as actor:
        assert [line for line in actor.describe() if line.startswith("experts")] == list(lines)


@pytest.mark.slow
@on_ranks(1)
def test_experts_that_cannot_be_grouped_are_described(rank: Rank):
    narrow = rank.directory / "narrow"
    make_random_hf_model(narrow, QWEN3_MOE | {"moe_intermediate_size": 6}, seed=1)
    one_by_one = "experts: one after the other, because"
    size = f"{one_by_one} a row or a column of their weights is no multiple of 16 bytes"
    assert_described(rank, str(narrow), None, size)
    targets = f"{one_by_one} model.lora.targets names layers of some experts only"
    assert_described(rank, "qwen3_moe", lora.SOME_EXPERTS, targets)
    assert_described(rank, "qwen3", None)


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
    from dppo_megatron.train.actor import experts

    monkeypatch.setattr(experts, "this_gpu", lambda: gpu)
    config = SimpleNamespace(engine=SimpleNamespace(exact=exact), model=SimpleNamespace(dtype=dtype))
    reason = experts.why_sequential([], config)
    assert reason is None if why is None else why in reason
