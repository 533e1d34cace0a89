"""Describe a teacher's servers as the engines of a config, so that they start and register like engines."""

from __future__ import annotations

from typing import Any

from dppo_megatron.config import Config, with_settings
from dppo_megatron.config.distillation import DistillationConfig
from dppo_megatron.config.model import LoraConfig
from dppo_megatron.config.schema import ObjectiveConfig
from dppo_megatron.run_dir import RunDir


def trainer_teacher_config(config: Config) -> Config:
    """Return the config with which trainer ranks build `Config.trainer_teacher`, in the policy's layout."""
    model_settings = {"path": config.trainer_teacher, "weights": None, "lora": LoraConfig(), "logits": "stored"}
    return with_settings(
        config,
        model={**model_settings, "batch_invariant_head": False},
        rollout={"routing_replay": False},
        engine={"exact": False},
    )


def teacher_config(config: Config, name: str) -> Config:
    """Return a config that has the servers of teacher `name` as engines.

    A teacher with urls has the servers at these urls, and a teacher with a path has an engine in RUN/teachers/NAME.
    Otherwise the config keeps the run's engines.
    """
    from dppo_megatron.hf import read_hf_config

    teacher, engine = config.distillation.teachers[name], config.engine
    engine_settings: dict[str, Any] = {
        "urls": teacher.urls,
        "kind": teacher.kind or engine.kind,
        "secret_file": teacher.secret_file,
    }
    if teacher.path is None:
        return with_settings(config, engine=engine_settings) if teacher.urls else config
    # A server also samples one token, and the teacher's prompt may be longer than the policy's.
    longest = engine.max_model_len + 1 + (config.data.max_prompt_tokens if teacher.prompt_template else 0)
    engine_settings |= {"max_model_len": min(longest, read_hf_config(teacher.path).max_position_embeddings), "port": 0}
    engine_settings |= {
        "tensor_parallel": teacher.tensor_parallel,
        "max_logprobs": config.distillation.topk,
        "exact": False,
    }
    engine_settings |= dict.fromkeys(("count", "nodes", "pipeline_parallel"), 1)
    engine_settings |= {"expert_parallel": False, "placement": "disaggregated", "quantization": "none"}
    return with_settings(
        config,
        run={"dir": RunDir(config.run.dir).teacher(name)},
        model={"path": teacher.path, "weights": None, "lora": LoraConfig()},
        objective=ObjectiveConfig(),
        distillation=DistillationConfig(),
        engine=engine_settings,
        rollout={"topk_logprobs": 0, "routing_replay": False, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        weight_sync={"lora": "merged", "directory": None},
    )
