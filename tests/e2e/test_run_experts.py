"""Whole runs of models with experts: expert-parallel ranks, a real vLLM server, its routing replayed, top-K DPPO."""

import json
import shutil
from pathlib import Path

import pytest

from dppo_megatron.bank import BankReader
from dppo_megatron.hf import make_random_hf_model
from tests.support.actor_cases import GLM4_MOE, GPT_OSS_SERVED, MLA_MOE, MOE, set_expert_bias
from tests.support.runs import GROUPS, STEPS, config_tree, train_to_end

pytestmark = pytest.mark.engines
QWEN3_MOE = {**MOE, "moe_intermediate_size": 32}
DEEPSEEK_V3 = {
    **MLA_MOE,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # as in DeepSeek-V3: vLLM's CPU kernel takes no other latent than 512 + 64
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "moe_intermediate_size": 32,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


GLM_4_5 = {**GLM4_MOE, "head_dim": 32, "n_routed_experts": 16, "moe_intermediate_size": 32}


def make_sparse_model(dense: Path, directory: Path, changes: dict) -> Path:
    """The dense model of the other runs with experts, and its tokenizer. Only gpt-oss has some in the first layer."""
    config = json.loads((dense / "config.json").read_text())
    if "kv_lora_rank" in changes:
        del config["head_dim"]  # latent attention has its own widths
    make_random_hf_model(directory, config | changes, seed=1)
    for file in dense.iterdir():
        if not (directory / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, directory)
    if "n_group" in changes:
        set_expert_bias(directory)
    return directory


@pytest.mark.parametrize(
    "changes", [QWEN3_MOE, DEEPSEEK_V3, GLM_4_5, GPT_OSS_SERVED], ids=lambda changes: changes["model_type"]
)
def test_experts_route_as_the_engine_did(task, tmp_path, changes):
    sparse_model = make_sparse_model(task / "random_model", tmp_path / "model", changes)
    tree = config_tree(task, tmp_path / "run")
    tree["model"]["path"] = str(sparse_model)
    tree["parallel"] = {"world_size": 2, "expert": 2, "timeout_s": 120}
    tree["objective"] = {"name": "dppo_topk_tv", "settings": {"delta": 0.2}}
    tree["rollout"] |= {"routing_replay": True, "topk_logprobs": 8}
    tree["train"]["updates_per_step"] = 1  # a second one would find routers that have moved
    trained = train_to_end(tree)
    # Engine and trainer compute in fp32 with the same weights, so they route alike and agree on every token.
    assert all(r["moe/routing_replay_disagreement"] < 0.005 for r in trained)
    assert all(r["mismatch/max_abs_logprob_difference"] < 1e-4 for r in trained)
    assert all(r["probe/max_abs_logprob_difference"] < 1e-4 for r in trained)
    bank = BankReader(tmp_path / "run" / "bank")
    assert bank.refresh() == STEPS * GROUPS
    layers = json.loads((sparse_model / "config.json").read_text())["num_hidden_layers"]
    sparse_layers = layers if changes is GPT_OSS_SERVED else layers - 1
    for group in map(bank.read, bank.entries(0, STEPS * GROUPS)):
        for rollout in group.rollouts:
            tokens = len(group.prompt.token_ids) + len(rollout.token_ids)
            assert rollout.routed_experts.shape == (tokens - 1, sparse_layers, changes["num_experts_per_tok"])
