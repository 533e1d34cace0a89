"""Ranks for the tests: processes over gloo or NCCL, started once per world size, that run one function at a time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.statistics_reference import Case, lay_out, make_inputs, weighted

_PATIENCE = 120.0


class CountCollectives(TorchDispatchMode):
    """Counts every operation of torch.distributed that reaches the dispatcher, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


def shard_case(
    case: Case, rank: int, backend: str = "torch", count: bool = True, device: str = "cpu", **options: Any
) -> dict[str, Any]:
    """Run token_statistics on this rank's columns. Returns its results and its gradient, on the CPU, and its
    collectives.

    count=False: without the dispatch modes that count them, under which torch.compile does nothing.
    """
    from dppo_megatron.vocab_parallel import token_statistics

    inputs = make_inputs(case).to(device)
    first = sum(case.columns[:rank])
    shard = lay_out(inputs.logits[:, first : first + case.columns[rank]], case.layout)
    logits = shard.requires_grad_()
    uneven = len(set(case.columns)) > 1
    if uneven:
        options["vocab_start"] = first
    forward, backward = CountCollectives(), CountCollectives()
    with forward if count else nullcontext():
        stats = token_statistics(
            logits * 1.0 if case.layout == "contiguous" else logits,
            inputs.target,
            inputs.topk,
            case.vocab,
            inputs.temperature,
            dist.group.WORLD if dist.is_initialized() else None,
            case.entropy,
            backend,
            **options,
        )
    values = (stats.logprob, stats.entropy, stats.topk_logprob, stats.other_logprob)
    loss = weighted(values, inputs.weights, case.entropy == "differentiable")
    with backward if count else nullcontext():
        loss.backward()
    names = ("logprob", "entropy", "topk_logprob", "other_logprob")
    return {
        "values": {name: None if v is None else v.detach().cpu() for name, v in zip(names, values, strict=True)},
        "nonfinite": stats.nonfinite.cpu(),
        "gradient": None if logits.grad is None else logits.grad.cpu(),
        "forward": dict(forward.found),
        "backward": dict(backward.found),
    }


def _send(pipe: Any, answer: tuple[str, Any]) -> None:
    # Plain pickle: torch would otherwise move each tensor through a shared-memory file of its own.
    pipe.send_bytes(pickle.dumps(answer))


def _serve(rank: int, world: int, store: str, backend: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world)
    _send(pipe, ("ready", None))
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            answer = ("done", function(rank=rank, **arguments))
        except Exception as error:
            answer = ("raised", (type(error).__name__, str(error), traceback.format_exc()))
        _send(pipe, answer)
    dist.destroy_process_group()


class RankError(Exception):
    """What the ranks raised: a list of (type name, message)."""

    def __init__(self, raised: list[tuple[str, str]], details: str) -> None:
        super().__init__(details)
        self.raised = raised


class Ranks:
    def __init__(self, world: int, backend: str = "gloo") -> None:
        # The fork server imports torch (and Dynamo, which dispatch modes need) once for all ranks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._folder = tempfile.TemporaryDirectory()
        self.world = world
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world, f"{self._folder.name}/store", backend, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            self._receive(pipe)

    def _receive(self, pipe: Any) -> tuple[str, Any]:
        if not pipe.poll(_PATIENCE):
            raise TimeoutError(f"a rank did not answer within {_PATIENCE} s")
        return pickle.loads(pipe.recv_bytes())

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """function(rank=..., **arguments) on every rank -> results in rank order. RankError if any raised."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._receive(pipe) for pipe in self._pipes]
        raised = [(value[0], value[1]) for kind, value in answers if kind == "raised"]
        if raised:
            details = "\n".join(value[2] for kind, value in answers if kind == "raised")
            raise RankError(raised, f"{len(raised)} of {self.world} ranks raised\n{details}")
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
        self._folder.cleanup()
