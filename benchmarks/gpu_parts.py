"""The parts of gpu_day.py that train: each prints what it measured and exits with 1 where a number is wrong.

python benchmarks/gpu_parts.py actor --device cpu --work /tmp/day
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from gpu_values import require, require_value

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
TINY = {
    **QWEN3_06B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Size:
    model: dict[str, Any]
    sequences: int  # of an update
    prompt: int
    response: int
    micro_batch_tokens: int
    topk: int = 20


SIZES = {"cuda": Size(QWEN3_06B, 64, 128, 384, 8192), "cpu": Size(TINY, 8, 4, 12, 64)}


@dataclass(frozen=True)
class Day:
    device: str
    work: Path

    @property
    def size(self) -> Size:
        return SIZES[self.device]

    @property
    def model(self) -> Path:
        """Random weights, written by the first part that asks."""
        from dppo_megatron.hf import make_random_hf_model

        directory = self.work / "model"
        if not directory.exists():
            make_random_hf_model(directory, self.size.model, seed=1, dtype=torch.bfloat16)
        return directory

    @contextlib.contextmanager
    def actor(self, **sections: dict[str, Any]) -> Iterator[Any]:
        """Alone in this process, in bf16."""
        from dppo_megatron.actor import Actor, init_layout
        from dppo_megatron.checks import load_config

        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": str(self.work / "run")},
            "model": {"path": str(self.model), "dtype": "bf16"},
            "train": {"steps": 10, "micro_batch_tokens": self.size.micro_batch_tokens},
            "data": {"train": "unused.jsonl"},
            "optimizer": {"lr": 1e-6},
        }
        for name, settings in sections.items():
            tree[name] = tree.get(name, {}) | settings
        path = self.work / f"actor-{os.environ.get('RANK', '0')}.yaml"
        path.write_text(yaml.safe_dump(tree))
        config = load_config(path)
        layout = init_layout(config)
        try:
            actor = Actor(config, layout)
            actor.load_hf(config.model.path)
            yield actor
        finally:
            layout.close()
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()

    def batches(self, *, topk: int = 0) -> list[Any]:
        """An update's micro-batches: groups of 8 whose advantages add up to 0, log-probs still to be filled in."""
        from dppo_megatron.data.packing import TokenSequence, pack

        size, generator = self.size, np.random.default_rng(0)
        vocab = size.model["vocab_size"]

        def ids(*shape: int) -> np.ndarray:
            return generator.integers(0, vocab, shape, dtype=np.int32)

        def lists(k: int) -> dict[str, np.ndarray]:
            if not k:
                return {}
            ranked = np.sort(ids(size.response, k), axis=1)
            return {"topk_ids": ranked, "rollout_topk_logprob": np.full((size.response, k), -12.0, np.float32)}

        sequences = [
            TokenSequence(
                ids(size.prompt),
                ids(size.response),
                loss_weight=1 / (size.sequences * size.response),
                advantage=(-1.0) ** number,
                columns={"rollout_logprob": np.zeros(size.response, np.float32), **lists(topk)},
            )
            for number in range(size.sequences)
        ]
        each = size.micro_batch_tokens // (size.prompt + size.response)
        return [pack(sequences[i : i + each]) for i in range(0, len(sequences), each)]

    def on_policy(self, actor: Any, *, topk: int = 0) -> list[Any]:
        """The same with the actor's own log-probs, as an engine without mismatch would give them."""
        batches = self.batches(topk=topk)
        return [replace(b, rollout_logprob=own) for b, own in zip(batches, actor.logprobs(batches), strict=True)]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak(self) -> str:
        return f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if self.device == "cuda" else "peak -"


def timed_updates(day: Day, actor: Any, batches: list[Any], objective: Any, count: int) -> list[Any]:
    """After one more to warm up; prints their times."""
    tokens = sum(b.token_ids.shape[0] for b in batches)
    actor.train_update(batches, objective)
    found = []
    for _ in range(count):
        started = time.perf_counter()
        found.append(actor.train_update(batches, objective))
        seconds = time.perf_counter() - started
        stats = found[-1]
        print(
            f"  update {seconds:.3f} s (forward and backward {stats.forward_backward_s:.3f}, optimizer "
            f"{stats.optimizer_s:.3f}), {tokens / seconds:,.0f} tokens/s, loss {stats.loss:.3e}, grad norm "
            f"{stats.grad_norm:.3e}, {day.peak()}"
        )
        require_value(
            not stats.skipped and np.isfinite(stats.grad_norm) and stats.grad_norm > 0, "the update was skipped"
        )
    return found


@contextlib.contextmanager
def no_wait_in_the_loss(day: Day) -> Iterator[None]:
    """Inside, an operation of the loss that makes the host wait for the GPU raises."""
    from dppo_megatron.actor import forward

    compute = forward.LossStep.loss

    def loss(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return compute(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(forward.LossStep, "loss", loss) if day.device == "cuda" else contextlib.nullcontext():
        yield


def actor(day: Day) -> None:
    from dppo_megatron.objectives import build_objective

    kinds = ["local"]
    if day.device == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        kinds.insert(0, "transformer_engine")
    else:
        print("transformer_engine: not on this machine")
    logprobs = {}
    for layers in kinds:
        with day.actor(model={"layers": layers}) as built:
            print(f"{layers}: " + "; ".join(built.describe()))
            batches = day.on_policy(built)
            logprobs[layers] = torch.cat([b.rollout_logprob[b.mask] for b in batches])
            timed_updates(day, built, batches, build_objective("dppo_binary_tv"), 3)
            with no_wait_in_the_loss(day):
                built.train_update(batches, build_objective("gspo"))
            print("  the loss never waited for the device" if day.device == "cuda" else "  (no device to wait for)")
    with day.actor(model={"layers": "local", "dtype": "fp32"}) as exact:
        wanted = torch.cat([b.rollout_logprob[b.mask] for b in day.on_policy(exact)])
    for layers, own in logprobs.items():
        difference = (own - wanted).abs()
        print(f"{layers}, bf16 against fp32: |log-prob| mean {difference.mean():.2e}, max {difference.max():.2e}")
        require_value(
            bool(difference.mean() < 0.05), f"log-probs of {layers} layers in bf16 are far from those in fp32"
        )


def offload(day: Day) -> None:
    """Where two runs that keep everything on the device agree bit for bit, the one that does not must too. Else, for
    kernels of the backward pass add in any order, it may differ from them as they differ from each other."""
    from dppo_megatron.objectives import build_objective

    weights = []
    for away in (False, False, True):
        with day.actor(optimizer={"offload": away}) as built:
            print(f"optimizer.offload {away}")
            timed_updates(day, built, day.on_policy(built), build_objective("dppo_binary_tv"), 2)
            weights.append([p.detach().cpu().clone() for chunk in built.model_chunks for p in chunk.parameters()])
    kept, again, moved = weights
    total, noise = sum(p.numel() for p in kept), differing(kept, again)
    changed = min(differing(kept, moved), differing(again, moved))
    if noise == 0:
        require_value(changed == 0, f"{changed} of {total} weights differ with optimizer.offload, and none without")
        print("weights are the same, bit for bit")
    else:
        print(f"of {total} weights {noise} differ between two runs without optimizer.offload, {changed} with it")
        require_value(changed <= 2 * noise, "optimizer.offload changes more weights than another run does")


def differing(some: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    return sum(int((a != b).sum()) for a, b in zip(some, others, strict=True))


def grpo(day: Day) -> None:
    from dppo_megatron.objectives import build_objective

    for name, topk in (("grpo", 0), ("dppo_topk_tv", day.size.topk)):
        with day.actor(rollout={"topk_logprobs": topk}) as built:
            started = time.perf_counter()
            batches = day.on_policy(built, topk=topk)
            day.synchronize()
            print(f"{name}: log-probs of {len(batches)} micro-batches {time.perf_counter() - started:.3f} s")
            if name == "grpo":
                batches = [replace(b, old_logprob=b.rollout_logprob) for b in batches]
            timed_updates(day, built, batches, build_objective(name), 3)


def colocated(day: Day) -> None:
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    from make_task import make_task

    make_task(day.work / "task", seed=1)
    tree = {
        "run": {"dir": str(day.work / "colocated"), "stall_timeout_s": 150},
        "model": {"path": str(day.work / "task" / "random_model"), "dtype": "bf16"},
        "parallel": {"world_size": 1, "timeout_s": 120},
        "objective": {"name": "dppo_binary_tv", "settings": {"delta": 0.2}},
        "reward": {"name": "tests.support.rewards:even_digits"},
        "data": {"train": str(day.work / "task" / "train.jsonl"), "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 16, "group_size": 8, "max_response_tokens": 8},
        "train": {"steps": 2, "updates_per_step": 2},
        "optimizer": {"lr": 1e-4},
        "engine": {"placement": "colocated", "dtype": "bf16", "max_model_len": 64, "kv_cache_bytes": 1 << 28},
        "weight_sync": {"probe_tolerance": 0.3},
        "checkpoint": {"every": 0},
    }
    config = day.work / "colocated.yaml"
    config.write_text(yaml.safe_dump(tree))
    code = subprocess.run([sys.executable, "-m", "dppo_megatron", "train", str(config)], env=os.environ).returncode
    for log in sorted((day.work / "colocated" / "logs").glob("*.log")) if code else ():
        print(f"-- {log.name}\n{log.read_text()[-2000:]}")
    require(code == 0, f"the run ended with {code}")
    path = day.work / "colocated" / "metrics.jsonl"
    steps = [r for r in map(json.loads, path.read_text().splitlines()) if "time/step_s" in r]
    require(len(steps) == 2, f"{len(steps)} of 2 steps were trained")
    for record in steps:
        print({name: record[name] for name in sorted(record) if name.startswith(("time/", "mismatch/", "probe/"))})


PARTS = {part.__name__: part for part in (actor, offload, grpo, colocated)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=SIZES, required=True)
    parser.add_argument("--work", type=Path, required=True, help="directory that the parts share")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    PARTS[arguments.part](Day(arguments.device, arguments.work))


if __name__ == "__main__":
    main()
