"""For every family, any two tensors of a layer that are exchanged show, in HF's layout and in those of the engines."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from dppo_megatron import hf
from dppo_megatron.hf.families import FAMILIES
from dppo_megatron.weights import fingerprint
from tests.support.models import CONFIGS
from tests.weights.test_fingerprint import module

Tensors = dict[str, torch.Tensor]


def layers_of(family: str) -> list[Tensors]:
    """Return random tensors of one layer of each kind, with scales next to the projections as in FP8."""
    shapes = hf.WeightMap(hf.parse_hf_config(CONFIGS[family])).hf_tensors()
    generator = torch.Generator().manual_seed(0)
    layers: dict[str, Tensors] = {}
    for name, shape in shapes.items():
        if ".layers." in name:
            own = layers.setdefault(name.split(".layers.")[1].split(".")[0], {})
            own[name] = torch.randn(shape, generator=generator)
            if name.endswith("proj.weight") and len(shape) == 2:
                own[f"{name}_scale_inv"] = torch.rand(-(-shape[0] // 8), -(-shape[1] // 8), generator=generator)
    kinds = {tuple(name.replace(f".{number}.", "..", 1) for name in own): own for number, own in layers.items()}
    return list(kinds.values())


def sums(tensors: Tensors) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        fingerprint.add(found, name, tensor)
    return found


def held(tensors: Tensors, mla: str) -> dict[str, int | None]:
    """Return the fingerprint of an engine that fuses projections and experts as vLLM (`mla` = its name) and SGLang."""
    modules: dict[str, torch.nn.Module] = {}
    left = dict(tensors)
    for fused in ("qkv_proj", "gate_up_proj", mla, "in_proj_ba"):
        for name in tensors:
            head, dot, rest = name.rpartition(f"{fingerprint._FUSED[fused][0]}.")
            names = [f"{head}{part}.{rest}" for part in fingerprint._FUSED[fused]]
            if dot and ".experts." not in name and all(each in left for each in names):
                parts = [left.pop(each) for each in names]
                of_name = modules.setdefault(f"{head}{fused}", module("ColumnParallelLinear"))
                setattr(of_name, rest, torch.nn.Parameter(torch.cat(parts)))
                if rest == "weight":
                    of_name.output_partition_sizes = [len(part) for part in parts]
    numbers = sorted(
        {int(name.split(".experts.")[1].split(".")[0]) for name in left if ".experts." in name and "_proj." in name}
    )
    if numbers:
        prefix = next(name for name in left if ".experts." in name).partition(".experts.")[0] + ".experts"
        experts = modules[prefix] = module("FusedMoE", moe_config=SimpleNamespace())
        for suffix in ("weight", "weight_scale_inv"):
            of_part = {
                part: [left.pop(f"{prefix}.{n}.{part}_proj.{suffix}") for n in numbers]
                for part in ("gate", "up", "down")
            }
            gate_up = torch.stack([torch.cat(pair) for pair in zip(of_part["gate"], of_part["up"], strict=True)])
            setattr(experts, f"w13_{suffix}", torch.nn.Parameter(gate_up))
            setattr(experts, f"w2_{suffix}", torch.nn.Parameter(torch.stack(of_part["down"])))
    shares: dict[str, tuple[int, int] | None] = {}
    for name, tensor in left.items():
        head, _, rest = name.rpartition(".")
        setattr(modules.setdefault(head, module()), rest, torch.nn.Parameter(tensor))
    for name, each in modules.items():
        fingerprint.add_shares(shares, fingerprint.module_shares(name, each, set()))
    return fingerprint.join_workers([shares])[0]


@pytest.mark.parametrize("family", CONFIGS)
def test_two_tensors_of_one_shape_that_are_exchanged_show(family):
    assert CONFIGS.keys() == FAMILIES.keys()
    for layer in layers_of(family):
        pairs = [(a, b) for a, b in itertools.combinations(layer, 2) if layer[a].shape == layer[b].shape]
        blind = [(a, b) for a, b in pairs if sums({a: layer[a], b: layer[b]}) == sums({a: layer[b], b: layer[a]})]
        assert pairs
        assert blind == []


@pytest.mark.parametrize("mla", ["fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"], ids=["vllm", "sglang"])
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - {"gpt_oss"}))
def test_fused_layouts_have_the_sums_of_the_tensors_also_if_these_are_exchanged(family, mla):
    """gpt-oss, with its own layout of experts, is in test_fingerprint.py."""
    for layer in layers_of(family):
        by_shape: dict[torch.Size, list[str]] = {}
        for name, tensor in layer.items():
            by_shape.setdefault(tensor.shape, []).append(name)
        rotated = {
            a: layer[b] for names in by_shape.values() for a, b in zip(names, names[1:] + names[:1], strict=True)
        }
        assert held(layer, mla) == sums(layer)
        assert held(rotated, mla) == sums(rotated) != sums(layer)


@pytest.mark.parametrize("family", CONFIGS)
def test_tensors_of_a_layer_have_different_factors_whatever_their_sizes(family):
    """Except weight, bias and scales of one projection, which have different shapes in every model."""
    for layer in layers_of(family):
        modules = {
            (
                fingerprint.group_of(name),
                name.removesuffix("_scale_inv").removesuffix("_bias").removesuffix(".bias").removesuffix(".weight"),
            )
            for name in layer
        }
        factors = [(group, fingerprint._salt(fingerprint.part_of(f"{name}.weight"))) for group, name in modules]
        assert len(set(factors)) == len(factors), sorted(modules)
