"""Checks config.json and weights against the configured layout and precision. `actor` has the supported models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dppo_megatron.config import Config, with_settings
from dppo_megatron.errors import bounded
from dppo_megatron.run_dir import RunDir

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig


def read(config: Config) -> HFModelConfig | None:
    """Return the model's config.json, or None if it cannot be read, which `problems` reports."""
    from dppo_megatron.hf import ModelError, read_hf_config

    try:
        return read_hf_config(config.model.path)
    except (ModelError, OSError):
        return None


def problems(config: Config, hf: HFModelConfig | None, absent: list[str], *, elsewhere: bool) -> list[str]:
    """Return why the model cannot be built. Add missing files to `absent`. `elsewhere` means it runs on `slurm.gpu`."""
    from dppo_megatron.train.actor import check_model

    out = check_model(on_any_machine(config) if elsewhere else config)
    if not (config.model.path / "config.json").exists():
        absent += [line for line in out if line.startswith("model.path = ")]
        out = [line for line in out if line not in absent]
    if hf is not None:
        out += _weights(config, hf, absent)
    return out + (_capability(config) if elsewhere else [])


def _weights(config: Config, hf: HFModelConfig, absent: list[str]) -> list[str]:
    """Return why trainer or engines cannot start from their weights. Reads only headers, in milliseconds per file."""
    from dppo_megatron.hf import ModelError, WeightMap, header_problems, open_weights
    from dppo_megatron.hf.torch_dist_place import is_torch_dist

    m = config.model
    out: list[str] = []
    paths = {"model.path": m.path} if m.weights is None or config.started_engines else {}
    for setting, directory in (paths if m.weights is None else paths | {"model.weights": m.weights}).items():
        try:
            if mismatches := header_problems(WeightMap(hf), open_weights(directory, hf)):
                raise ModelError(str(directory), ["its weights do not fit config.json", *mismatches])
        except ModelError as error:
            run = "a run; name RUN/checkpoints/step-N" if RunDir(directory).checkpoints.is_dir() else ""
            problem = f"{setting} = {error.source}: {run or bounded('; '.join(error.problems), 600)}"
            has_weights = is_torch_dist(directory) or any(directory.glob("*.safetensors"))
            (out if has_weights else absent).append(problem)
    return out + _adapter(config, hf)


def _adapter(config: Config, hf: HFModelConfig) -> list[str]:
    from dppo_megatron.hf.peft import adapter_problems

    lora = config.model.lora
    if lora.adapter is None:
        return []
    if not lora.r:
        return [f"model.lora.adapter = {lora.adapter}: model.lora.r = 0 trains none; set it to the adapter's r"]
    return [f"model.lora.adapter = {lora.adapter}: {problem}" for problem in adapter_problems(lora.adapter, hf, lora)]


def on_any_machine(config: Config) -> Config:
    """Return the config without model settings that need certain devices. No parameter depends on these settings."""
    return with_settings(config, model={"layers": "local", "fp8": "none"})


def _capability(config: Config) -> list[str]:
    """Return settings that the GPUs cannot compute. An unknown kind of GPU is assumed to compute all of them."""
    from dppo_megatron.common.hardware import hardware
    from dppo_megatron.train.actor.precision import RECIPES, capability_problems

    kind = config.slurm.gpu
    newest = max(recipe.capability for recipe in RECIPES.values())
    return capability_problems(config, hardware(kind, "slurm.gpu").capability if kind else newest)
