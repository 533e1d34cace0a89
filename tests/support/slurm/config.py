"""A config of two trainer nodes and an engine node that no model or data stands behind."""

from __future__ import annotations

from dppo_megatron.config import Config


def config(*, world_size=16, engines=4, tensor_parallel=2, sections=None, **slurm) -> Config:
    """`sections`: further ones, and what to add to those here."""
    sections = dict(sections or {})
    return Config.model_validate(
        {
            "run": {"dir": "run"},
            "model": {"path": "model", **sections.pop("model", {})},
            "data": {"train": "train.jsonl"},
            "train": {"steps": 1},
            "parallel": {"world_size": world_size},
            "engine": {"count": engines, "tensor_parallel": tensor_parallel, **sections.pop("engine", {})},
            "slurm": {"trainer_nodes": 2, "engine_nodes": 1, **slurm},
            **sections,
        }
    )
