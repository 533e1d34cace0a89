"""Fills Megatron model chunks from a model directory or a checkpoint after checking the whole source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .errors import ModelError
from .hf_config import HFModelConfig
from .megatron_model import ParallelRanks, has_ends, infer_layout, local_layers, named_weights
from .parse_config import read_hf_config
from .rules import Entry, HFTensor
from .torch_dist_place import model_directory
from .transformer_fields import disagreements
from .weight_map import WeightMap
from .weight_source import WeightSource, cast_problem, open_weights, source_problems


@torch.no_grad()
def load_into(
    model_chunks: Sequence[nn.Module],
    hf_dir: str | Path,
    config: HFModelConfig | None = None,
    ranks: ParallelRanks | None = None,
    source: WeightSource | None = None,
) -> WeightMap:
    """Fill every local parameter of `model_chunks` from `hf_dir`; return the weight map. No collectives.

    `hf_dir` is a Hugging Face directory, FP8 included, or a Megatron checkpoint saved in any layout. If `source` is
    given, the weights come from `source` instead. `model_chunks` has a GPTModel, or a DDP / Float16Module wrapper, for
    each virtual pipeline stage; without virtual stages, one model. Each rank reads only the bytes in the rank's
    tensor, pipeline and expert shard, and casts to the parameter dtype. Padded vocabulary rows become zero. An
    optimizer with a separate fp32 copy must reload that copy afterwards (`optimizer.reload_model_params()`).

    Raises `ModelError` before any parameter is written. The error lists every missing, unexpected or misshaped tensor,
    every parameter without a counterpart, every HF tensor without a parameter and every TransformerConfig field that
    differs from config.json. After writing, raises `ModelError` naming every tensor that is not finite or overflows the
    parameter dtype.
    """
    config = config or read_hf_config(model_directory(hf_dir))
    ranks = ranks or ParallelRanks.current()
    weight_map = WeightMap(config, infer_layout(model_chunks, config, ranks))
    stored = source or open_weights(hf_dir, config)
    weights, problems = _match(weight_map, model_chunks)
    problems += disagreements(model_chunks, config)
    problems += [p for entry, weight in weights if (p := _shape_problem(weight_map, entry, weight, ranks))]
    problems += source_problems(weight_map, stored)
    if problems:
        raise ModelError(str(hf_dir), problems)
    not_finite = []
    for entry, weight in weights:
        shard = _shard(weight_map, entry, ranks, lambda tensor: stored.tensor(tensor.name))
        weight.copy_(shard)
        if problem := cast_problem(entry, [shard], [weight]):
            not_finite.append(problem)
        del shard
        stored.release()
    if not_finite:
        raise ModelError(str(hf_dir), not_finite)
    return weight_map


def _match(weight_map: WeightMap, model_chunks: Sequence[nn.Module]) -> tuple[list[tuple[Entry, Tensor]], list[str]]:
    """Match local weights with their entries; also return the mismatches on both sides."""
    problems: list[str] = []
    weights, filled = [], set()
    for name, weight in named_weights(model_chunks):
        try:
            entry = weight_map.entry(name)
        except ModelError as error:
            problems += error.problems
            continue
        weights.append((entry, weight))
        filled |= {t.name for t in entry.hf}
    for entry in _expected(weight_map, model_chunks):
        problems += [f"{t.name}: the Megatron model has no parameter for it" for t in entry.hf if t.name not in filled]
    layers = max(local_layers(model_chunks), default=-1) + 1
    if layers > weight_map.config.num_layers:
        problems.append(f"the Megatron model has {layers} layers, config.json {weight_map.config.num_layers}")
    return weights, problems


def _expected(weight_map: WeightMap, model_chunks: Sequence[nn.Module]) -> list[Entry]:
    """Return the entries that this rank must have for the local layers, embedding, final norm and head."""
    first, last = has_ends(model_chunks)
    ends = weight_map.end_entries()
    out = [e for e in ends if (first if e.megatron.startswith("embedding.") else last) and not e.rule.duplicate]
    for layer, experts in local_layers(model_chunks).items():
        out += weight_map.layer_entries(layer, experts or ())
    return out


def _shape_problem(weight_map: WeightMap, entry: Entry, weight: Tensor, ranks: ParallelRanks) -> str | None:
    """Compare shapes on meta tensors, without reading."""
    try:
        shape = tuple(_shard(weight_map, entry, ranks, lambda tensor: torch.empty(tensor.shape, device="meta")).shape)
    except ModelError as error:
        return f"{entry.megatron}: {error.problems[0]}"
    if shape == tuple(weight.shape):
        return None
    return f"{entry.megatron}: shape {tuple(weight.shape)} in the Megatron model, {shape} by config.json"


def _shard(weight_map: WeightMap, entry: Entry, ranks: ParallelRanks, load: Callable[[HFTensor], Tensor]) -> Tensor:
    """Return this rank's shard of the tensors that `load` returns."""
    group = ranks.expert_tensor if entry.is_expert else ranks.tensor
    return weight_map.to_megatron(entry, {t.name: load(t) for t in entry.hf}, group.rank, group.size)
