"""The parts of gpu_day.py that train. Each prints its measurements and exits with 1 if a number is wrong.

python benchmarks/gpu_parts.py actor --device cpu --work /tmp/day
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from gpu_case import ROOT, Day, copies, differing, no_wait_in_the_loss, run, timed_updates, weights
from gpu_values import require, require_value

FP8 = ("tensorwise", "blockwise")
FP8_FAR = 0.25  # bound of the mean difference of log-probs from fp32; in bf16 0.05


def actor(day: Day) -> None:
    _layers(day, day.model, True)


def moe(day: Day) -> None:
    _layers(day, day.moe_model, False)


def _layers(day: Day, model: Path, fp8: bool) -> None:
    """Train with each kind of layers, and with each FP8 recipe, and compare their log-probs with fp32."""
    kinds = {"local": {"layers": "local"}}
    if "transformer_engine" in day.layers:
        recipes = ("none", *(FP8 if fp8 else ()))
        kinds |= {f"transformer_engine, fp8 {name}": {"layers": "transformer_engine", "fp8": name} for name in recipes}
    else:
        print("transformer_engine: not on this machine")
    logprobs = {name: _train(day, name, {"path": str(model), **settings}) for name, settings in kinds.items()}
    with day.actor(model={"path": str(model), "layers": "local", "dtype": "fp32"}) as exact:
        wanted = torch.cat([b.rollout_logprob[b.mask] for b in day.on_policy(exact)])
    for name, own in logprobs.items():
        difference = (own - wanted).abs()
        print(f"{name}, against fp32: |log-prob| mean {difference.mean():.2e}, max {difference.max():.2e}")
        bound = 0.05 if kinds[name].get("fp8", "none") == "none" else FP8_FAR
        require_value(bool(difference.mean() < bound), f"log-probs of {name} are far from those in fp32")


def _train(day: Day, name: str, model: dict[str, str]) -> torch.Tensor:
    """Train a few updates, print their times, and return the log-probs before them."""
    from dppo_megatron.objectives import build_objective

    with day.actor(model=model) as built:
        print(f"{name}: " + "; ".join(built.describe()))
        batches = day.on_policy(built)
        timed_updates(day, built, batches, build_objective("dppo_binary_tv"), 3)
        with no_wait_in_the_loss(day):
            built.train_update(batches, build_objective("gspo"))
        print("  the loss never waited for the device" if day.device == "cuda" else "  (no device to wait for)")
        return torch.cat([b.rollout_logprob[b.mask] for b in batches])


def checkpoint(day: Day) -> None:
    """Save, train on, load: weights and optimizer state must have the saved bits. Times of save, load and export."""
    from dppo_megatron.hf import export_weights
    from dppo_megatron.objectives import build_objective

    with day.actor() as built:
        batches = day.on_policy(built)

        def state() -> list[torch.Tensor]:
            tensors = weights(built)
            for part in getattr(built.optimizer, "chained_optimizers", [built.optimizer]):
                masters = [p for group in part.optimizer.param_groups for p in group["params"]]
                tensors += masters + [
                    part.optimizer.state[p][name] for p in masters for name in ("exp_avg", "exp_avg_sq")
                ]
            return copies(tensors)

        built.train_update(batches, build_objective("dppo_binary_tv"))
        saved, started = state(), time.perf_counter()
        built.save_checkpoint(day.work / "checkpoints", 1, {"step": 1}, 1)
        called = time.perf_counter() - started
        built.finish_checkpoint()
        print(f"save: returned after {called:.2f} s, on disk after {time.perf_counter() - started:.2f} s")
        built.train_update(batches, build_objective("dppo_binary_tv"))
        changed = sum(differing([a], [b]) > 0 for a, b in zip(saved, state(), strict=True))
        require_value(changed > 0, "an update changed nothing")
        started = time.perf_counter()
        built.load_checkpoint(day.work / "checkpoints")
        print(f"load: {time.perf_counter() - started:.2f} s")
        wrong = sum(differing([a], [b]) > 0 for a, b in zip(saved, state(), strict=True))
        print(f"{len(saved)} tensors, {changed} changed by another update, {wrong} differ after loading")
        require_value(wrong == 0, f"{wrong} of {len(saved)} tensors differ after loading")
        started = time.perf_counter()
        size = sum(tensor.nbytes for _, tensor in export_weights(built.model_chunks, built.hf))
        day.synchronize()
        seconds = time.perf_counter() - started
        print(f"export under Hugging Face names: {size / 1e9:.2f} GB in {seconds:.2f} s")


def offload(day: Day) -> None:
    """Compare a run with optimizer.offload to two without it. These may differ: a backward pass adds in any order."""
    from dppo_megatron.objectives import build_objective

    found = []
    for away in (False, False, True):
        with day.actor(optimizer={"offload": away}) as built:
            print(f"optimizer.offload {away}")
            timed_updates(day, built, day.on_policy(built), build_objective("dppo_binary_tv"), 2)
            found.append(copies(weights(built)))
    kept, again, moved = found
    total, noise = sum(p.numel() for p in kept), differing(kept, again)
    changed = min(differing(kept, moved), differing(again, moved))
    if noise == 0:
        require_value(changed == 0, f"{changed} of {total} weights differ with optimizer.offload, and none without")
        print("weights are the same, bit for bit")
    else:
        print(f"of {total} weights {noise} differ between two runs without optimizer.offload, {changed} with it")
        require_value(changed <= 2 * noise, "optimizer.offload changes more weights than another run does")


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


PARTS = (actor, moe, offload, grpo, checkpoint, colocated)


def main() -> None:
    run(PARTS, __doc__)


if __name__ == "__main__":
    main()
