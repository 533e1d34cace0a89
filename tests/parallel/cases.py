"""The layouts of the parity suite, and the bank that all of them train on."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dppo_megatron.bank import BankWriter
from dppo_megatron.types import Prompt, Rollout, RolloutGroup

K, TEACHER_K = 8, 6
STEPS, PROMPTS, SAMPLES, LONGEST = 3, 4, 4, 20
TEMPERATURE = 0.9
SP = {"tensor": 2, "sequence": True}

DENSE = {
    "tp2": {"tensor": 2},
    "tp2_sp": SP,
    "pp2": {"pipeline": 2},
    "pp2_uneven": {"pipeline": 2, "last_stage_layers": 1},
    "vpp": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {},
    "dp2_plain_optimizer": {"distributed_optimizer": False},
    "tp2_sp_fused_recompute": {**SP, "settings": {"logits": "fused", "recompute": "full"}},
    "dp2_overlap": {"overlap": True},
    "dp2_overlap_fused": {"overlap": True, "settings": {"logits": "fused"}},
    "vpp_overlap": {"pipeline": 2, "virtual_pipeline": 2, "overlap": True},
}
EXPERTS = {
    "tp2_sp": SP,
    "pp2": {"pipeline": 2},
    "vpp": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {},
    "ep2": {"expert": 2},
    "tp2_whole_experts": {**SP, "expert_tensor": 1},
    "experts_cut_alone": {"expert_tensor": 2},
    "ep2_overlap": {"expert": 2, "overlap": True},
    "ep2_allgather": {"expert": 2, "expert_dispatcher": "allgather"},
}
PAIRS = {
    "tp2_pp2": {**SP, "pipeline": 2},
    "tp2_cp2": {**SP, "context": 2},
    "pp2_dp2": {"pipeline": 2},
    "pp2_dp2_overlap": {"pipeline": 2, "overlap": True},
}
EXPERT_PAIRS = {
    "ep2_tp2": {**SP, "expert": 2},
    "ep2_tp2_whole_experts": {**SP, "expert": 2, "expert_tensor": 1},
    "ep2_tp2_allgather": {**SP, "expert": 2, "expert_dispatcher": "allgather"},
    "ep2_cp2": {"context": 2, "expert": 2},
}
REPLAY = {
    "ep2": {"expert": 2},
    "cp2": {"context": 2},
    "tp2_sp": SP,
    # Layers run again in the backward pass, with other micro-batches in between.
    "vpp_recompute": {"pipeline": 2, "virtual_pipeline": 2, "settings": {"recompute": "full"}},
}

# Layouts that the same model trains in with another objective, with replayed routes, or as a part of another layout.
DENSE_ELSEWHERE = ("tp2", "pp2", "vpp")
EXPERTS_ELSEWHERE = ("tp2_sp", "pp2", "cp2", "dp2")

# world size -> case -> layout. A case is model[+variant]:layout. gspo compares whole sequences, split by CP, and cppo
# the tokens before each one; centred has gradients through the top-K log-probs; kept is over what top-p and top-k left;
# taught has a teacher's list besides the engine's, both over what they left, and one process and pipelines compute each
# prompt once, which context parallelism does not.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        **{f"{model}:one": {} for model in ("qwen3", "qwen3_moe", "qwen3_moe+replay", "deepseek", "glm")},
        **{f"{model}:one": {} for model in ("delta", "delta_moe+replay", "mistral", "glm_flash", "tied")},
        **{f"qwen3+{variant}:one": {} for variant in ("gspo", "cppo", "centred", "kept", "taught")},
    },
    2: {
        **{f"qwen3:{name}": layout for name, layout in DENSE.items() if name not in DENSE_ELSEWHERE},
        "qwen3+gspo:cp2": DENSE["cp2"],
        "qwen3+cppo:cp2": DENSE["cp2"],
        "qwen3+centred:cp2_fused": {**DENSE["cp2"], "settings": {"logits": "fused"}},
        "qwen3+centred:tp2": {"tensor": 2},
        "qwen3+kept:tp2": {"tensor": 2},
        "qwen3+kept:tp2_sp_fused": {**SP, "settings": {"logits": "fused"}},
        "qwen3+kept:cp2": DENSE["cp2"],
        "qwen3+kept:pp2": DENSE["pp2"],
        "qwen3+taught:tp2": {"tensor": 2},
        "qwen3+taught:tp2_sp_fused": {**SP, "settings": {"logits": "fused"}},
        "qwen3+taught:cp2": DENSE["cp2"],
        "qwen3+taught:pp2_fused": {**DENSE["pp2"], "settings": {"logits": "fused"}},
        **{f"qwen3_moe:{name}": layout for name, layout in EXPERTS.items() if name not in EXPERTS_ELSEWHERE},
        **{f"qwen3_moe+replay:{name}": layout for name, layout in REPLAY.items()},
        **{
            f"{model}:{name}": EXPERTS[name]
            for model in ("deepseek", "glm", "glm_flash")
            for name in ("tp2_sp", "pp2", "cp2", "ep2")
        },
        **{f"mistral:{name}": DENSE[name] for name in ("tp2_sp", "pp2", "cp2")},
        **{f"tied:{name}": DENSE[name] for name in ("tp2", "pp2")},
        **{f"delta:{name}": DENSE[name] for name in ("tp2", "tp2_sp", "pp2_uneven", "vpp", "dp2_overlap")},
        **{f"delta_moe+replay:{name}": REPLAY[name] for name in ("tp2_sp", "ep2", "vpp_recompute")},
    },
    4: {
        **{f"qwen3:{name}": PAIRS[name] for name in ("tp2_pp2", "tp2_cp2")},
        **{f"qwen3_moe:{name}": layout for name, layout in {**PAIRS, **EXPERT_PAIRS}.items()},
        "deepseek:ep2_tp2": EXPERT_PAIRS["ep2_tp2"],
    },
}
DPPO = {"name": "dppo_topk_tv", "aggregation": "token_mean", "settings": {"delta": 0.1}}
CENTRED = {"delta": 0.1, "ratio_cap": 1.2, "centering": "policy", "response_region": "max", "response_delta": 2.0}
OBJECTIVES = {
    "gspo": {"name": "gspo", "aggregation": "seq_mean_token_mean"},
    "cppo": {"name": "cppo", "settings": {"delta": 0.05, "position_weight": 0.3}},
    "centred": {"name": "dppo_binary_tv", "aggregation": "token_mean", "settings": CENTRED},
    "kept": {
        "name": "dppo_binary_tv",
        "aggregation": "token_mean",
        "settings": {**CENTRED, "entropy_coefficient": 0.05},
    },
}
OBJECTIVES["taught"] = {
    "name": "dppo_topk_tv",
    "aggregation": "token_mean",
    "settings": {"delta": 0.1, "distillation": "jensen_shannon", "distillation_coefficient": 0.5},
}
DIVERGENCES = ("jensen_shannon", "forward_kl", "reverse_kl")  # of the three steps of a taught case
TRUNCATED = {"top_p": 0.9, "top_k": 12}  # mostly fewer than K tokens, so that some lists are the whole set
FAST = (
    "qwen3:cp2",
    "qwen3:tp2_sp_fused_recompute",
    "tied:pp2",
    "qwen3+taught:cp2",
    "qwen3+gspo:cp2",
    "qwen3_moe:ep2",
    "qwen3_moe:tp2_whole_experts",
    "qwen3_moe:ep2_allgather",
    "qwen3_moe+replay:vpp_recompute",
    "deepseek:cp2",
    "delta:tp2_sp",
)
SMOKE = "deepseek:ep2_tp2"  # runs in every shard
NEXT = (  # run with the newest Megatron-core as well: every family, every kind of layout
    "qwen3:tp2_sp",
    "qwen3:pp2_uneven",
    "qwen3:vpp_overlap",
    "qwen3:cp2",
    "qwen3:dp2_overlap_fused",
    "qwen3_moe:tp2_whole_experts",
    "qwen3_moe:experts_cut_alone",
    "qwen3_moe:ep2_allgather",
    "qwen3_moe:ep2_cp2",
    "qwen3_moe:pp2_dp2_overlap",
    "qwen3_moe+replay:vpp_recompute",
    "deepseek:tp2_sp",
    "deepseek:pp2",
    "deepseek:cp2",
    "deepseek:ep2_tp2",
    "glm:tp2_sp",
    "delta:tp2_sp",
    "delta:vpp",
    "delta_moe+replay:ep2",
)


def sections(bank: Path, variant: str) -> dict[str, dict]:
    return {
        "train": {"steps": STEPS, "micro_batch_tokens": 96},
        "rollout": {
            "bank": str(bank),
            "prompts_per_step": PROMPTS,
            "group_size": SAMPLES,
            "max_response_tokens": LONGEST,
            "temperature": TEMPERATURE,
            "topk_logprobs": K,
            "routing_replay": variant == "replay",
            **(TRUNCATED if variant in ("kept", "taught") else {}),
        },
        "objective": OBJECTIVES.get(variant, DPPO),
    }


def bank_of(model: str) -> str:
    """The bank's name: a variant that samples otherwise has its own."""
    return f"{model.partition('+')[0]}+kept" if model.endswith(("+kept", "+taught")) else model.partition("+")[0]


def write_bank(directory: Path, model: Path, seed: int = 0, *, truncated: bool = False) -> None:
    """Rollouts that the model samples itself with noise on its logits, and its routers with noise on theirs."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with BankWriter(directory, PROMPTS, fsync=False) as bank:
        for group in sample_groups(policy, STEPS * PROMPTS, generator, truncated=truncated):
            bank.append(group)


@torch.no_grad()
def sample_groups(
    policy: Any, count: int, generator: torch.Generator, *, truncated: bool = False
) -> list[RolloutGroup]:
    """Sample all groups at once: a row's prompt has 2 to 11 tokens, and no token depends on the padding after it."""
    vocab, rows = policy.config.vocab_size, torch.arange(count * SAMPLES)
    sizes = torch.randint(2, 12, (count,), generator=generator).repeat_interleave(SAMPLES)
    prompts = torch.randint(0, vocab, (count, 11), generator=generator).repeat_interleave(SAMPLES, 0)
    tokens, steps = torch.nn.functional.pad(prompts, (0, LONGEST)), []
    for ends in (sizes + step for step in range(LONGEST)):
        logits = policy(tokens[:, : int(ends.max())]).logits[rows, ends - 1]
        noise = 0.3 * torch.randn(logits.shape, generator=generator)
        logprobs = ((logits + noise) / TEMPERATURE).log_softmax(-1)
        if truncated:
            logprobs = _truncate(logprobs)
        steps.append(logprobs)
        tokens[rows, ends] = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
    logprobs = torch.stack(steps, dim=1)
    topk = logprobs.topk(K)
    whole = logprobs.masked_fill(logprobs == -torch.inf, -12.0)
    # Draws of its own, so that the other cases have the same data as without a teacher.
    noise = torch.randn(whole.shape, generator=torch.Generator().manual_seed(generator.initial_seed() + 1))
    teacher = (whole + noise).log_softmax(-1)
    taught = teacher.topk(TEACHER_K)
    known = taught.indices.masked_fill(logprobs.gather(2, taught.indices) == -torch.inf, -1)
    responses = tokens.gather(1, sizes[:, None] + torch.arange(LONGEST))
    sampled = logprobs.gather(2, responses[..., None])[..., 0]
    routed = _routing(policy, tokens, generator)
    lengths = torch.randint(3, LONGEST + 1, (len(rows),), generator=generator).tolist()
    rollouts = [
        Rollout(
            token_ids=responses[i, :n].int().numpy(),
            rollout_logprob=sampled[i, :n].numpy(),
            versions=np.zeros(n, np.int32),
            finish_reason="stop",
            topk_ids=topk.indices[i, :n].masked_fill(topk.values[i, :n] == -torch.inf, -1).int().numpy(),
            rollout_topk_logprob=topk.values[i, :n].numpy(),
            teacher_logprob=teacher.gather(2, responses[..., None])[i, :n, 0].numpy(),
            teacher_ids=known[i, :n].int().numpy(),
            teacher_topk_logprob=taught.values[i, :n].numpy(),
            routed_experts=None if routed is None else routed[i, : sizes[i] + n - 1].numpy(),
            sampling_mask_ids=(logprobs[i, :n] > -torch.inf).nonzero()[:, 1].int().numpy() if truncated else None,
            sampling_mask_counts=(logprobs[i, :n] > -torch.inf).sum(1).int().numpy() if truncated else None,
        )
        for i, n in enumerate(lengths)
    ]
    rewards = np.resize(np.array([0, 1], np.float32), SAMPLES)
    return [
        RolloutGroup(
            Prompt(position, position, tokens[first, : sizes[first]].int().numpy(), "", ""),
            tuple(rollouts[first : first + SAMPLES]), rewards, rewards < 0, TEMPERATURE,
        )
        for position, first in enumerate(range(0, len(rows), SAMPLES))
    ]  # fmt: skip


def _truncate(logprobs: torch.Tensor) -> torch.Tensor:
    ordered, order = logprobs.topk(TRUNCATED["top_k"])
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    ordered = ordered.masked_fill(before >= TRUNCATED["top_p"], -torch.inf)
    return torch.full_like(logprobs, -torch.inf).scatter(1, order, ordered).log_softmax(-1)


def _routing(policy: Any, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """Return [n, tokens, layers, k] uint8; None for models whose routing transformers does not return."""
    if policy.config.model_type not in ("qwen3_moe", "qwen3_5_moe_text"):
        return None
    logits = torch.stack(policy(tokens, output_router_logits=True).router_logits, dim=-2)
    noisy = logits + 0.2 * torch.randn(logits.shape, generator=generator)
    experts = noisy.topk(policy.config.num_experts_per_tok).indices.to(torch.uint8)
    return experts.view(*tokens.shape, *experts.shape[1:])
