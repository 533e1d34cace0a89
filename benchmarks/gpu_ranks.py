"""The parts of gpu_day.py that train on several ranks. They compare each layout with one process on the whole batch.

python benchmarks/gpu_ranks.py tp2 --device cpu --work /tmp/day

This command starts the ranks. Every rank first trains one update by itself on its own device, in fp32 and in bf16. Then
all ranks train the update together. Adam has eps = 1, far above any gradient, and there is no clipping. Each weight
therefore moves by lr x gradient, and weights exported under their Hugging Face names give the gradient in every layout.

Bounds in fp32: 1e-3 for log-probs on average, 1e-4 for the loss (its weights add up to 1), 1e-3 of its norm for the
gradient of each tensor. In bf16 a layout may differ from one process in fp32 by twice as much as one process in bf16
does, plus 5e-3 for log-probs, 2e-3 for the loss and 2e-2 for gradients. With experts, rounding sends some tokens to
other experts. The bound of each tensor's gradient is then 5e-2 in fp32. In bf16 only the whole gradient is compared,
with the same factor plus 1e-1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_case import SIZES, Day, no_wait_in_the_loss
from gpu_values import Problems, values_checked

TIMEOUT_S = 60.0  # limit of a collective
END_S = 15.0  # time for the other ranks to end after one has failed
LR = 1e3  # safe only with the large eps; above LARGEST_LR, the limit of the settings
LARGEST_LR = 0.1
NOISE = 0.1  # between the rollout's log-probs and the trainer's, so that ratios are not 1
LOGPROB, LOSS = {"fp32": 1e-3, "bf16": 5e-3}, {"fp32": 1e-4, "bf16": 2e-3}
GRADIENT, WITH_EXPERTS = {"fp32": 1e-3, "bf16": 2e-2}, {"fp32": 5e-2, "bf16": 1e-1}
FACTOR = {"fp32": 0.0, "bf16": 2.0}  # times the distance of one process from fp32


@dataclass(frozen=True)
class Case:
    """One layout. parallel: settings of the section `parallel`, except the world size."""

    name: str
    parallel: dict[str, Any]
    moe: bool = False
    objectives: tuple[str, ...] = ()  # further ones that must not wait for the device


TP2 = {"tensor": 2, "sequence": True}
CASES = {
    "tp2": (Case("tensor 2 + sequence", TP2),),
    "cp2": (Case("context 2", {"context": 2}, objectives=("gspo",)),),
    "ep2": (Case("expert 2", {"expert": 2}, moe=True),),
    "dp2": (Case("data 2, overlap", {"overlap": True}),),
    "pp2": (Case("pipeline 2", {"pipeline": 2}),),
    "mesh": (
        Case("tensor 2 + sequence, context 2, overlap", {**TP2, "context": 2, "overlap": True}),
        Case("tensor 2 + sequence, expert 2", {**TP2, "expert": 2, "expert_tensor": 1}, moe=True),
    ),
}


@dataclass(frozen=True)
class Seen:
    """Results of an actor on the batches that this rank read."""

    logprobs: list[torch.Tensor]  # [T] fp32 of each batch
    loss: float
    gradient: dict[str, torch.Tensor]  # by Hugging Face name, of the weights that this rank exports

    def of(self, place: int, replicas: int) -> Seen:
        """Return the results for the share of the batches that a data-parallel rank reads."""
        return replace(self, logprobs=self.logprobs[place::replicas])


def make_models(day: Day, part: str) -> None:
    """Write the models before the ranks start, because all ranks load them."""
    for case in CASES[part]:
        _ = day.moe_model if case.moe else day.model


def train(day: Day, part: str) -> None:
    """Run the part on one rank. Raises SystemExit at the end when something was wrong."""
    problems = Problems()
    alone: dict[tuple[bool, str], Seen] = {}
    batches: dict[bool, list[Any]] = {}
    for case in CASES[part]:
        if case.moe not in batches:
            batches[case.moe] = day.batches()
            if values_checked():
                with _by_itself(), _actor(day, case.moe, "fp32", {}) as built:
                    batches[case.moe] = _with_noise(built, batches[case.moe])
                    alone[case.moe, "fp32"] = _seen(built, batches[case.moe])
                with _by_itself(), _actor(day, case.moe, "bf16", {}) as built:
                    alone[case.moe, "bf16"] = _seen(built, batches[case.moe])
        for dtype in ("fp32", "bf16"):
            _rendezvous(day)
            size = {"world_size": int(os.environ["WORLD_SIZE"]), "timeout_s": TIMEOUT_S}
            with _actor(day, case.moe, dtype, {**case.parallel, **size}) as built:
                print(f"{case.name}, {dtype}: {built.layout.describe()}", flush=True)
                place, replicas = built.layout.data_parallel_rank, built.layout.data_parallel_size
                own = batches[case.moe][place::replicas]
                seen = None
                with problems.noted(f"{case.name}, {dtype}"), no_wait_in_the_loss(day):
                    seen = _seen(built, own)
                if seen is not None and values_checked():
                    exact, same = (alone[case.moe, kind].of(place, replicas) for kind in ("fp32", dtype))
                    _compare(problems, case, dtype, seen, exact, same)
                if dtype == "bf16":
                    _no_waits(day, problems, case, built, own)
                    _time(day, built, own)
    problems.end()


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    """Make this rank a world of size 1 inside the context."""
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
        rank = os.environ.pop("RANK")  # the patch restores it
        try:
            yield
        finally:
            os.environ["RANK"] = rank


def _rendezvous(day: Day) -> None:
    """Agree on a port for the next group. With an existing group this does nothing."""
    from tests.support.ranks import rendezvous

    if not dist.is_initialized():
        rendezvous(Path(os.environ["GPU_DAY_MEETING"]))


@contextlib.contextmanager
def _actor(day: Day, moe: bool, dtype: str, parallel: dict[str, Any]) -> Iterator[Any]:
    with day.actor(
        # TransformerEngine has no attention in fp32.
        model={
            "path": str(day.moe_model if moe else day.model),
            "dtype": dtype,
            "layers": "local" if dtype == "fp32" else "auto",
        },
        parallel=parallel,
        optimizer={"lr": LARGEST_LR, "eps": 1.0, "grad_clip": 0.0, "weight_decay": 0.0},
    ) as actor:
        actor.lr_scale = LR / LARGEST_LR
        yield actor


def _with_noise(actor: Any, batches: list[Any]) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [
        replace(b, rollout_logprob=own + NOISE * torch.randn(own.shape, generator=generator) * b.mask)
        for b, own in zip(batches, actor.logprobs(batches), strict=True)
    ]


def _objective(name: str = "dppo_binary_tv") -> Any:
    from dppo_megatron.objectives import build_objective

    return build_objective(name)


def _exported(actor: Any) -> dict[str, torch.Tensor]:
    from dppo_megatron.hf import export_weights

    return {name: tensor.clone() for name, tensor in export_weights(actor.model_chunks, actor.hf)}


def _seen(actor: Any, batches: list[Any]) -> Seen:
    """Train one update, then load the first weights again."""
    logprobs, before = actor.logprobs(batches), _exported(actor)
    stats = actor.train_update(batches, _objective())
    after = _exported(actor)
    actor.load_hf(actor.config.model.path)
    gradient = {name: (after[name].double() - before[name].double()).div_(LR).float() for name in before}
    return Seen(logprobs, stats.loss, gradient)


def _compare(problems: Problems, case: Case, dtype: str, seen: Seen, exact: Seen, same: Seen) -> None:
    """Compare with one process in fp32 (`exact`) and one process in this dtype (`same`)."""
    what, factor = f"{case.name}, {dtype}", FACTOR[dtype]
    wanted = torch.cat(exact.logprobs)
    far = float((torch.cat(seen.logprobs) - wanted).abs().mean())
    bound = factor * float((torch.cat(same.logprobs) - wanted).abs().mean()) + LOGPROB[dtype]
    print(f"  log-probs: mean difference {far:.2e} from one process in fp32, bound {bound:.2e}")
    problems.value(far <= bound, f"{what}: log-probs differ by {far:.2e} on average, allowed {bound:.2e}")
    loss, bound = abs(seen.loss - exact.loss), factor * abs(same.loss - exact.loss) + LOSS[dtype]
    print(f"  loss {seen.loss:.6f}, one process in fp32 {exact.loss:.6f}, bound {bound:.2e}")
    problems.value(loss <= bound, f"{what}: the loss differs by {loss:.2e}, allowed {bound:.2e}")
    if seen.gradient:  # otherwise other ranks export
        _compare_gradients(problems, case, dtype, seen.gradient, exact.gradient, same.gradient)


Tensors = dict[str, torch.Tensor]


def _compare_gradients(
    problems: Problems, case: Case, dtype: str, seen: Tensors, exact: Tensors, same: Tensors
) -> None:
    allowed, factor = (WITH_EXPERTS if case.moe else GRADIENT)[dtype], FACTOR[dtype]
    total = _norm(exact.values())
    whole = _norm(seen[name] - exact[name] for name in seen) / _norm(exact[name] for name in seen)
    bound = factor * _norm(same[name] - exact[name] for name in seen) / _norm(exact[name] for name in seen) + allowed
    print(f"  gradients of {len(seen)} tensors: {whole:.2e} of their norm apart, bound {bound:.2e}")
    problems.value(whole <= bound, f"{case.name}, {dtype}: gradients differ by {whole:.2e}, allowed {bound:.2e}")
    found = []
    for name, gradient in seen.items():
        # A tensor with almost no gradient is compared with the whole gradient instead.
        scale = max(_norm([exact[name]]), 1e-4 * total)
        far, bound = _norm([gradient - exact[name]]) / scale, factor * _norm([same[name] - exact[name]]) / scale
        found.append((far / (bound + allowed), f"{name} {far:.2e}, bound {bound + allowed:.2e}"))
    share, worst = max(found)
    print(f"  of them the one nearest to its bound: {worst}")
    if not (case.moe and dtype == "bf16"):
        beyond = sum(share > 1 for share, _ in found)
        problems.value(share <= 1, f"{case.name}, {dtype}: gradients of {beyond} tensors beyond their bounds: {worst}")


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return sum(float(tensor.norm()) ** 2 for tensor in tensors) ** 0.5


def _no_waits(day: Day, problems: Problems, case: Case, actor: Any, batches: list[Any]) -> None:
    """Check further objectives for waits. The compared update has already checked the first one."""
    actor.lr_scale = 1e-12
    for name in case.objectives:
        with problems.noted(f"{case.name}, {name}"), no_wait_in_the_loss(day):
            actor.train_update(batches, _objective(name))
    if day.device == "cpu":
        print("  (no device to wait for)")
    elif not problems:
        print("  the loss never waited for the device", flush=True)


def _time(day: Day, actor: Any, batches: list[Any]) -> None:
    actor.lr_scale = 1e-12
    day.forget()
    actor.train_update(batches, _objective(), another_follows=True)
    for last in (False, True):
        started = time.perf_counter()
        stats = actor.train_update(batches, _objective(), another_follows=not last)
        seconds = time.perf_counter() - started
        print(
            f"  update {seconds:.3f} s (forward and backward {stats.forward_backward_s:.3f}, optimizer "
            f"{stats.optimizer_s:.3f}), {stats.tokens / seconds:,.0f} tokens/s of all ranks, {day.peak()}",
            flush=True,
        )


def start(part: str, day: Day, size: int) -> int:
    """Run the ranks and return the exit status. The output of rank 0 is shown; other ranks' only if they fail."""
    make_models(day, part)
    with tempfile.TemporaryDirectory() as meeting:
        ranks, logs = [], [Path(meeting) / f"rank-{rank}.log" for rank in range(size)]
        for rank, log in enumerate(logs):
            environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "GPU_DAY_MEETING": meeting}
            if day.device == "cpu":
                environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, __file__, part, "--device", day.device, "--work", str(day.work)]
            with log.open("w") as output:
                ranks.append(
                    subprocess.Popen(
                        command, env=environment, stdout=None if rank == 0 else output, stderr=subprocess.STDOUT
                    )
                )
        codes = _all_ended(ranks)
        for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
            if code and rank > 0:
                print(f"-- rank {rank}: exit status {code}\n{log.read_text()[-3000:]}", flush=True)
    return int(any(codes))


def _all_ended(ranks: list[subprocess.Popen]) -> list[int]:
    """Return the exit statuses. The time limit of the part ends ranks that wait for each other."""
    ends = float("inf")
    while any(rank.poll() is None for rank in ranks):
        if ends == float("inf") and any(rank.poll() for rank in ranks):
            ends = time.monotonic() + END_S
        if time.monotonic() > ends:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    return [rank.wait() for rank in ranks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=CASES)
    parser.add_argument("--device", choices=SIZES, required=True)
    parser.add_argument("--work", type=Path, required=True, help="directory that the parts share")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    day = Day(arguments.device, arguments.work)
    if "GPU_DAY_MEETING" not in os.environ:
        return start(arguments.part, day, arguments.ranks)
    train(day, arguments.part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
