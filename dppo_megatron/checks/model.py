"""Rules of the model in the configured layout and precision, from its config.json; `actor` knows what it can build."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dppo_megatron.config import Config

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig


def read(config: Config) -> HFModelConfig | None:
    """The model's config.json; None where `problems` reports why it cannot be read."""
    from dppo_megatron.hf import ModelError, read_hf_config

    try:
        return read_hf_config(config.model.path)
    except ModelError:
        return None


def problems(config: Config, hf: HFModelConfig | None, *, elsewhere: bool) -> list[str]:
    """`elsewhere`: the run has other GPUs than this machine, those of `slurm.gpu`."""
    from dppo_megatron.actor import check_model
    from dppo_megatron.hf import ModelError, open_weights

    out = check_model(on_any_machine(config) if elsewhere else config)
    if config.model.weights is not None and not out:
        try:
            open_weights(config.model.weights, hf)
        except ModelError as error:
            out.append(f"model.weights = {error}")
    return out + (_capability(config) if elsewhere else [])


def on_any_machine(config: Config) -> Config:
    """The same model without the settings that not every machine can compute; no parameter depends on them."""
    model = config.model.model_copy(update={"layers": "local", "fp8": "none"})
    return config.model_copy(update={"model": model})


def _capability(config: Config) -> list[str]:
    """A GPU of an unknown kind is taken for one that computes everything."""
    from dppo_megatron.actor.precision import RECIPES, capability_problems
    from dppo_megatron.common.hardware import hardware

    kind = config.slurm.gpu
    newest = max(recipe.capability for recipe in RECIPES.values())
    return capability_problems(config, hardware(kind).capability if kind else newest)
