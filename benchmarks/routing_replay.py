"""Compare the log-probs of trainer and engine for a mixture of experts, with routing replay off and on.

    python benchmarks/routing_replay.py                      a vLLM server that returns the experts of every token
    python benchmarks/routing_replay.py --engine emulated    a bf16 trainer that records its own routing instead

The engine samples in bf16, the trainer computes in fp32 with the same weights. If a router's scores are near a tie, the
two send a token to different experts. Replay sends it to the engine's experts; the remaining difference is rounding.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from dppo_megatron.config import Config
from dppo_megatron.data.packing import TokenSequence, pack
from dppo_megatron.hf import make_random_hf_model
from dppo_megatron.objectives import build_objective
from dppo_megatron.rollout.engines.kinds import build_engine
from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.fleet.registry import engine_urls
from dppo_megatron.run.checks import load_config
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor import Actor, init_layout
from dppo_megatron.types import Prompt, Rollout, TokenBatch

VOCAB, PROMPT, RESPONSE = 512, 16, 64
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "initializer_range": 0.1,
}
Sample = tuple[Prompt, Rollout]


def make_config(directory: Path, dtype: str) -> Config:
    path = directory / f"{dtype}.yaml"
    tree = {
        "run": {"dir": str(directory / "run")},
        "model": {"path": str(directory / "model"), "dtype": dtype},
        "train": {"steps": 1},
        "data": {"train": "unused.jsonl", "max_prompt_tokens": 128},
        "rollout": {"routing_replay": True, "max_response_tokens": RESPONSE},
        "engine": {"dtype": "bf16", "max_model_len": 256, "max_num_seqs": 64, "kv_cache_bytes": 2**27},
    }
    path.write_text(yaml.safe_dump(tree))
    return load_config(path)


def prompts(count: int) -> list[Prompt]:
    generator = np.random.default_rng(0)
    return [Prompt(i, i, generator.integers(2, VOCAB, PROMPT, dtype=np.int32), "", "") for i in range(count)]


def sampled_by_vllm(directory: Path, count: int, group: int) -> list[Sample]:
    config = make_config(directory, "bf16")
    command = [sys.executable, "-m", "dppo_megatron", "engine", str(directory / "bf16.yaml")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    log = directory / "engine.log"
    with open(log, "w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def still_runs() -> None:
        if server.poll() is not None:
            sys.exit(f"the engine ended:\n{log.read_text()[-3000:]}")

    try:
        (url,) = engine_urls(config, RunDir(config.run.dir), still_runs)
        return asyncio.run(_generate(config, url, prompts(count), group))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


async def _generate(config: Config, url: str, requested: list[Prompt], group: int) -> list[Sample]:
    engine = build_engine(config, url)
    try:
        requests = [
            GenerateRequest(
                request_id=f"group-{p.position}",
                token_ids=p.token_ids,
                n=group,
                seeds=tuple(range(group)),
                temperature=1.0,
                max_tokens=RESPONSE,
                routed_experts=True,
            )
            for p in requested
        ]
        groups = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    if any(r.routed_experts is None for rollouts in groups for r in rollouts):
        sys.exit("this engine does not return routed experts; use --engine emulated")
    return [(p, r) for p, rollouts in zip(requested, groups, strict=True) for r in rollouts]


def sampled_by_actor(directory: Path, count: int, group: int) -> list[Sample]:
    """Return samples of transformers in bf16, scored by an actor in bf16 that records its routing."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.bfloat16).eval()
    requested = [p for p in prompts(count) for _ in range(group)]
    tokens = torch.from_numpy(np.stack([p.token_ids for p in requested])).long()
    whole = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=True, max_new_tokens=RESPONSE, top_k=0, pad_token_id=0
    )
    samples = []
    with build_actor(make_config(directory, "bf16")) as actor:
        used = _recorded_experts(actor)
        for prompt, row in zip(requested, whole.int().numpy(), strict=True):
            used.clear()
            logprobs = actor.score(row)[PROMPT - 1 :]
            experts = torch.stack(used, dim=1)[: len(row) - 1].to(torch.uint8).numpy()  # [T, L, k]
            response = row[PROMPT:]
            versions = np.zeros(len(response), np.int32)
            samples.append((prompt, Rollout(response, logprobs, versions, "length", routed_experts=experts)))
    return samples


def _recorded_experts(actor: Actor) -> list[torch.Tensor]:
    """Return a list to which every router appends the experts [T, k] that it uses, layer by layer."""
    used: list[torch.Tensor] = []

    def recording(choose: Any) -> Any:
        def recorded(*arguments: Any, **options: Any) -> Any:
            scores, experts = choose(*arguments, **options)
            used.append(experts)
            return scores, experts

        return recorded

    for layer in actor.model_chunks[0].decoder.layers:
        if (router := getattr(layer.mlp, "router", None)) is not None:
            router.router_replay.get_replay_topk = recording(router.router_replay.get_replay_topk)
    return used


@contextmanager
def build_actor(config: Config) -> Iterator[Actor]:
    """Yield an actor without other ranks."""
    layout = init_layout(config)
    try:
        actor = Actor(config, layout)
        actor.load_hf(config.model.path)
        yield actor
    finally:
        layout.close()


def batches(samples: list[Sample], size: int = 16) -> list[TokenBatch]:
    """Pack samples with the engine's routing. Advantages alternate, so that an update has a gradient."""
    weight = 1 / sum(len(r.token_ids) for _, r in samples)
    sequences = [
        TokenSequence.from_rollout(p, r, advantage=(-1.0) ** i, loss_weight=weight, replay_routing=True)
        for i, (p, r) in enumerate(samples)
    ]
    return [pack(sequences[i : i + size]) for i in range(0, len(sequences), size)]


def differences(actor: Actor, packed: list[TokenBatch]) -> torch.Tensor:
    """Return |trainer - engine log-prob| of every sampled token."""
    own = actor.logprobs(packed)
    return torch.cat([(a - b.rollout_logprob)[b.mask].abs() for a, b in zip(own, packed, strict=True)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "emulated"), default="vllm")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # bf16 represents these weights exactly, so all differences come from arithmetic.
        make_random_hf_model(directory / "model", MODEL, seed=1, dtype=torch.bfloat16)
        sample = sampled_by_vllm if arguments.engine == "vllm" else sampled_by_actor
        packed = batches(sample(directory, arguments.prompts, arguments.group_size))
        with build_actor(make_config(directory, "fp32")) as actor:
            off = differences(actor, [replace(b, routed_experts=None) for b in packed])
            on = differences(actor, packed)
            stats = actor.train_update(packed, build_objective("dppo_binary_tv"))
    share = stats.metrics["moe/routing_replay_disagreement"]
    print(f"bf16 engine ({arguments.engine}), fp32 trainer, {len(on)} tokens: |trainer - engine log-prob|")
    print("routing replay      mean       p99       max")
    for label, values in (("off", off), ("on", on)):
        print(f"{label:<14}{values.mean():>10.5f}{values.quantile(0.99):>10.5f}{values.max():>10.5f}")
    print(f"experts that the trainer would not have chosen: {share:.2%} (moe/routing_replay_disagreement)")
    return 0 if on.mean() < off.mean() else 1


if __name__ == "__main__":
    raise SystemExit(main())
