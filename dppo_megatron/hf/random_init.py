"""Creates a model directory with random weights, without network access, to start a policy or a test."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .hf_config import HFModelConfig
from .parse_config import parse_hf_config
from .safetensors_writer import (
    DEFAULT_SHARD_BYTES,
    PartWriter,
    assemble,
    check_space,
    create_staging,
    publish,
    refuse_existing,
    with_dtype,
    write_config,
)
from .weight_map import WeightMap


def make_random_hf_model(
    directory: str | Path,
    config_dict: Mapping[str, Any],
    seed: int,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> HFModelConfig:
    """Write `directory` with config.json and random weights that transformers and the engines load.

    `config_dict` is the config.json content and must name one supported architecture in `architectures`. Missing
    keys that readers require are added, such as `model_type` and the rotary base as transformers 4 and 5 spell it. The
    same seed gives the same bytes. The caller adds the tokenizer.

    Linear weights and embeddings are normal with standard deviation `initializer_range` (default 0.02). Biases are 0,
    and norm factors are 1. In gated delta net `dt_bias` is 1, and exp(`A_log`) is uniform from 1 to 16.

    Raises `ModelError` for an invalid config, too little disk space, or an existing directory without `overwrite`.
    """
    config = parse_hf_config(config_dict, f"config of {directory}")
    refuse_existing(directory, overwrite)
    staging = create_staging(directory)
    try:
        shapes = WeightMap(config).hf_tensors()
        check_space(staging, sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize)
        generator = torch.Generator().manual_seed(seed)
        writer = PartWriter(staging, "00000", shard_bytes)
        for name, shape in shapes.items():
            writer.add(name, _initial(name, shape, config, generator).to(dtype))
        assemble(staging, writer.close())
        write_config(staging, with_dtype(complete_config(config_dict, config), dtype))
        publish(staging, directory, overwrite)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return config


def complete_config(config_dict: Mapping[str, Any], config: HFModelConfig) -> dict[str, Any]:
    """Add keys that readers require and a hand-written config may leave out."""
    rope = {"rope_theta": config.rope_theta, "rope_type": config.rope_type, **config.rope_scaling}
    filled = {
        "model_type": config.family,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads,
        "tie_word_embeddings": config.tied_embeddings,
    }
    if config.partial_rotary_factor != 1.0:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    if config.mla is not None:
        del filled["head_dim"]  # readers derive it from the latent dimensions
    return {**filled, **config_dict}


def _initial(name: str, shape: tuple[int, ...], config: HFModelConfig, generator: torch.Generator) -> Tensor:
    if config.delta_net is not None:  # norms multiply by 1 + weight, except the gated norm
        if name.endswith("A_log"):
            return torch.empty(shape).uniform_(1, 16, generator=generator).log()
        if name.endswith(("dt_bias", "linear_attn.norm.weight")):
            return torch.ones(shape)
        if name.endswith("norm.weight"):
            return torch.zeros(shape)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    return torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)
