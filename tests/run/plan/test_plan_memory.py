"""The plan's bytes are within 10 % of those that an update on the CPU takes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dppo_megatron.config import Config
from dppo_megatron.hf import padded_vocab_size, read_hf_config
from dppo_megatron.run.plan import Load, RankBuilder, estimate, hardware
from tests.run.plan.measured import measure_checkpoints, measure_updates
from tests.support.configs import make_config
from tests.support.models import CONFIGS

TOKENS = 512
EXPERT_PARALLEL = {"world_size": 2, "tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}
SIZES = {  # large enough that activations, logits and states all count
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
DENSE = CONFIGS["qwen3"] | SIZES
EXPERTS = CONFIGS["qwen3_moe"] | SIZES | {"num_experts": 8, "moe_intermediate_size": 256, "mlp_only_layers": []}
LATENT = CONFIGS["deepseek_v3"] | SIZES | {
    "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "q_lora_rank": 96, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


def config(directory: Path, hf: dict, model: dict, parallel: dict, tokens: int, **sections: dict) -> Config:
    (directory / "config.json").write_text(json.dumps(hf))
    return make_config(
        model={"path": str(directory), "dtype": "fp32", **model},
        parallel=parallel,
        train={"steps": 1, "micro_batch_tokens": tokens},
        rollout={"bank": "unused"},
        **sections,
    )


def check(
    builder: RankBuilder,
    directory: Path,
    hf: dict,
    *,
    model: dict[str, Any] | None = None,
    tokens: int = TOKENS,
    **parallel: Any,
) -> None:
    """Every stage's plan against the measurement of its rank."""
    made = config(directory, hf, model or {}, parallel, tokens)
    micro_batches = 2 * made.parallel.pipeline
    measured = measure_updates(made, 8, micro_batches, directory)
    view = read_hf_config(directory)
    own = tokens // made.parallel.context
    padded = padded_vocab_size(view.vocab_size, made.parallel.tensor)
    ranks = builder.build(made)
    per_stage = made.parallel.world_size // made.parallel.pipeline
    for rank in ranks:
        memory = estimate(rank, view, made, hardware("cpu-16"), Load(own, micro_batches), padded)
        # Checkpoints are measured by themselves, below; of a model this small they take the most.
        updates = {name: items for name, items in memory.phases.items() if not name.endswith("a checkpoint")}
        planned = replace(memory, phases=updates).tensors
        first = rank.stage * per_stage
        alike = measured[first : first + per_stage]
        assert planned == pytest.approx(min(alike), rel=0.1), (rank.stage, measured)


@pytest.mark.slow
def test_dense_on_one_rank(builder, tmp_path):
    check(builder, tmp_path, DENSE)


@pytest.mark.parallel
def test_few_tokens(builder, tmp_path):
    """Gloo's copies for reducing the gradients dominate."""
    check(builder, tmp_path, DENSE, tokens=64)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("hf", "model", "parallel"),
    [
        (DENSE, {"recompute": "selective"}, {}),
        (DENSE, {"recompute": "full", "dtype": "bf16"}, {}),
        (DENSE, {"logits": "fused", "dtype": "bf16"}, {"world_size": 2}),
        (DENSE, {}, {"world_size": 2, "tensor": 2, "sequence": True}),
        (DENSE, {}, {"world_size": 2, "pipeline": 2}),
        (DENSE, {}, {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2}),
        (EXPERTS, {}, {}),
        (EXPERTS, {}, {"world_size": 2, "expert": 2}),
        (EXPERTS, {}, EXPERT_PARALLEL),
        (LATENT, {}, {}),
        (DENSE, {"lora": {"r": 16}}, {}),
        (EXPERTS, {"lora": {"r": 8}}, EXPERT_PARALLEL),
    ],
)
def test_layouts(builder, tmp_path, hf, model, parallel):
    check(builder, tmp_path, hf, model=model, **parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "asynchronous"),
    [
        ({}, False),
        ({}, True),
        ({"world_size": 2}, False),
        ({"world_size": 2}, True),
        ({"world_size": 2, "tensor": 2, "sequence": True}, False),
    ],
)
def test_a_checkpoint_takes_the_planned_memory(builder, tmp_path, parallel, asynchronous):
    """An asynchronous checkpoint, too, has only one copy of its data."""
    made = config(tmp_path, DENSE, {"dtype": "bf16"}, parallel, TOKENS, checkpoint={"asynchronous": asynchronous})
    (rank,) = builder.build(made)
    load = Load(TOKENS, 1)
    planned = estimate(rank, read_hf_config(tmp_path), made, hardware("cpu-16"), load, DENSE["vocab_size"]).phases
    saving, loading = (sum(i.bytes for i in planned[f"{kind} a checkpoint"]) for kind in ("saving", "loading"))
    measured = measure_checkpoints(made, tmp_path)
    assert saving == pytest.approx(max(save for save, _ in measured), rel=0.1), measured
    assert loading == pytest.approx(max(load for _, load in measured), rel=0.1), measured


@pytest.mark.slow
def test_a_save_takes_at_most_256_mib_of_a_gpu(builder, tmp_path):
    """Plan the largest save on one rank, which sends as much as it receives."""
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "vocab_size": 1 << 20}))
    made = make_config(model={"path": str(tmp_path), "dtype": "bf16"}, rollout={"bank": "unused"})
    (rank,) = builder.build(made)
    load = Load(TOKENS, 1)
    planned = estimate(rank, read_hf_config(tmp_path), made, hardware("h100-80"), load, 1 << 20).phases
    saving = sum(item.bytes for item in planned["saving a checkpoint"])
    assert rank.parameters * 12 > 1 << 32
    assert saving == 2 * (96 << 20) < 256 << 20
