"""The model that the run's engines start with."""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.config import Config
from dppo_megatron.hf import read_hf_config
from dppo_megatron.run_dir import RunDir


def start_model(config: Config) -> Path:
    """`model.path`, or with `engine.quantization` the quantised copy in the run directory (`launch.quantized`),
    for an engine takes only weights that are stored as those it started with."""
    quantized = config.engine.quantization != "none"
    if not quantized or read_hf_config(config.model.path).quantization is not None:
        return config.model.path
    return RunDir(config.run.dir).quantized_start
