"""Provides tiny models, configs and micro-batches for tests and the ranks that tests start."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dppo_megatron.config import Config
from dppo_megatron.types import TokenBatch
from tests.support.configs import make_config
from tests.support.published import read_models

TINY = read_models("tiny_models")
QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE = (TINY[name] for name in ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"))
GLM, OSS, DEEPSEEK = (TINY[name] for name in ("glm4_moe", "gpt_oss", "deepseek"))
YARN = TINY["moonlight"]["rope_parameters"]
# Fields that a family adds to Qwen3.
MOE, MLA_MOE, GLM4_MOE, DELTA_MOE = (TINY[name] for name in (".moe", ".mla_moe", ".glm4_moe", ".delta_moe"))
GPT_OSS, GPT_OSS_SERVED = TINY[".gpt_oss"], TINY[".gpt_oss_served"]
VOCAB = QWEN3["vocab_size"]
K = 4


def write_config(directory: Path, **changes: Any) -> Path:
    """Write a model directory with only a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    return directory


def make_models(root: Path, *names: str, **others: str) -> Path:
    """Write random fp32 models by their names in tiny_models.yaml; `others` maps a directory to a model name."""
    from dppo_megatron.hf import make_random_hf_model

    for directory, name in {**dict(zip(names, names, strict=True)), **others}.items():
        make_random_hf_model(root / directory, TINY[name], seed=1)
        set_expert_bias(root / directory)
    return root


def set_expert_bias(directory: Path) -> None:
    """Make correction biases large enough to change which experts are chosen; a new model has zeros."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name in sorted(tensors):
            if name.endswith("e_score_correction_bias"):
                tensors[name].normal_(0, 0.3, generator=generator)
        save_file(tensors, path, metadata={"format": "pt"})


def actor_config(
    model: Path,
    *,
    parallel: dict | None = None,
    optimizer: dict | None = None,
    sections: dict[str, dict] | None = None,
    **model_settings: Any,
) -> Config:
    """Return an actor config. `sections` replace shared sections; keyword arguments are further `model` settings."""
    tree = {
        "run": {"seed": 3},
        "model": {"path": str(model), "dtype": "fp32", **model_settings},
        "parallel": {"timeout_s": 60, **(parallel or {})},
        # Adam divides by |gradient|: with the usual eps, rounding decides the sign of the smallest gradients.
        "optimizer": {"lr": 1e-2, "eps": 1e-4, "grad_clip": 0.5, **(optimizer or {})},
        "train": {"steps": 10},
    }
    return make_config(**(tree | (sections or {})))


def sequences(count: int = 12, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Make sequences of 2 to 60 tokens with loss weights and all columns that a DPPO top-K method reads."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [2, 60, *torch.randint(3, 30, (count - 2,), generator=generator).tolist()]
    out = []
    for size in lengths:
        tokens = torch.randint(0, VOCAB, (size,), generator=generator)
        mask = torch.arange(size) >= min(2, size - 2)
        mask[-1] = False
        ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:K] for _ in range(size)])
        logprobs = torch.randn(size, K + 1, generator=generator).log_softmax(-1)[:, :K] - 1.0
        out.append(
            {
                "token_ids": tokens,
                "mask": mask,
                "advantage": torch.randn(1, generator=generator).expand(size).contiguous(),
                "rollout_logprob": -3.5 + 0.5 * torch.randn(size, generator=generator),
                "topk_ids": ids.int(),
                "rollout_topk_logprob": logprobs,
                "temperature": torch.full((size,), 0.9),
            }
        )
    total = sum(int(s["mask"].sum()) for s in out)
    for s in out:
        s["loss_weight"] = s["mask"] / total
    return out


def pack(parts: list[dict[str, torch.Tensor]]) -> TokenBatch:
    sizes = torch.tensor([len(p["token_ids"]) for p in parts])
    mask = torch.cat([p["mask"] for p in parts])
    targets = torch.cat([p["token_ids"].roll(-1) for p in parts])
    names = ("token_ids", "advantage", "rollout_logprob", "topk_ids", "rollout_topk_logprob", "temperature")
    return TokenBatch(
        **{name: torch.cat([p[name] for p in parts]) for name in names},
        position_ids=torch.cat([torch.arange(int(size)) for size in sizes]),
        cu_seqlens=torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int(),
        target_ids=torch.where(mask, targets, 0),
        mask=mask,
        loss_weight=torch.cat([p["loss_weight"] for p in parts]).float(),
    )


def with_sampling_masks(batch: TokenBatch) -> TokenBatch:
    """Restrict every other loss row to its target and top-K ids."""
    named = torch.zeros(len(batch.mask), VOCAB, dtype=torch.bool).scatter_(1, batch.topk_ids.long(), True)
    named[torch.arange(len(named)), batch.target_ids] = True
    named &= (batch.mask & (torch.arange(len(named)) % 2 == 0))[:, None]
    return replace(batch, sampling_mask_ids=named.nonzero()[:, 1].int(), sampling_mask_counts=named.sum(1).int())


def micro_batches(parts: list[dict[str, torch.Tensor]], count: int) -> list[TokenBatch]:
    """Distribute `parts` over `count` packed micro-batches."""
    return [pack(parts[i::count]) for i in range(count)]
