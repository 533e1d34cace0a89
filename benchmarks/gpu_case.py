"""What the parts of gpu_day.py share: the model, its batches, an actor, and the command line of one part."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from gpu_values import require_value

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
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
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
    sequences: int  # per update
    prompt: int
    response: int
    micro_batch_tokens: int
    topk: int = 20


SIZES = {"cuda": Size(QWEN3_06B, 64, 128, 384, 8192), "cpu": Size(TINY, 8, 4, 12, 64)}
MOE_SIZE = {"cuda": {"num_hidden_layers": 8, "moe_intermediate_size": 768}, "cpu": {"moe_intermediate_size": 48}}


@dataclass(frozen=True)
class Day:
    device: str
    work: Path

    @property
    def size(self) -> Size:
        return SIZES[self.device]

    @property
    def model(self) -> Path:
        """Return the directory of a model with random weights, which the first caller writes."""
        return self._made("model", self.size.model, seed=1)

    @property
    def moe_model(self) -> Path:
        """Return the same with experts."""
        return self._made("moe-model", {**self.size.model, **MOE, **MOE_SIZE[self.device]}, seed=2)

    def _made(self, name: str, shape: dict[str, Any], seed: int) -> Path:
        from dppo_megatron.hf import make_random_hf_model

        directory = self.work / name
        if not directory.exists():
            make_random_hf_model(directory, shape, seed=seed, dtype=torch.bfloat16)
        return directory

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the kinds of layers that can run here."""
        from dppo_megatron.train.actor.megatron_version import has_transformer_engine

        with_engine = self.device == "cuda" and has_transformer_engine()
        return ("local", "transformer_engine") if with_engine else ("local",)

    @contextlib.contextmanager
    def actor(self, **sections: dict[str, Any]) -> Iterator[Any]:
        """Yield an actor in bf16, without other ranks."""
        from dppo_megatron.run.checks import load_config
        from dppo_megatron.train.actor import Actor, init_layout

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
            self.forget()

    def batches(self, *, topk: int = 0) -> list[Any]:
        """Return the micro-batches of an update: groups of 8 with advantages that sum to 0, log-probs not filled in."""
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
        """Return the same batches with the actor's own log-probs, as from an engine without mismatch."""
        batches = self.batches(topk=topk)
        return [replace(b, rollout_logprob=own) for b, own in zip(batches, actor.logprobs(batches), strict=True)]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Free what an earlier actor of this process left, and measure the peak of memory from here.

        An actor that its caller still names is freed only by a later call.
        """
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> str:
        return f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if self.device == "cuda" else "peak -"


def timed_updates(day: Day, actor: Any, batches: list[Any], objective: Any, count: int) -> list[Any]:
    """Run one update to warm up and `count` more, and print their times."""
    tokens = sum(b.token_ids.shape[0] for b in batches)
    day.forget()
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
    """Raise when an operation of the loss inside this context makes the host wait for the GPU."""
    from dppo_megatron.train.actor import forward

    compute = forward.LossStep.loss

    def loss(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return compute(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(forward.LossStep, "loss", loss) if day.device == "cuda" else contextlib.nullcontext():
        yield


def weights(actor: Any) -> list[torch.Tensor]:
    return [p for chunk in actor.model_chunks for p in chunk.parameters()]


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors]


def differing(some: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    return sum(int((a != b).sum()) for a, b in zip(some, others, strict=True))


def run(parts: tuple[Callable[[Day], None], ...], description: str | None) -> None:
    """Run the part that the command line names."""
    named = {part.__name__: part for part in parts}
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=named)
    parser.add_argument("--device", choices=SIZES, required=True)
    parser.add_argument("--work", type=Path, required=True, help="directory that the parts share")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    named[arguments.part](Day(arguments.device, arguments.work))
