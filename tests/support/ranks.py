"""Provides ranks for tests: processes that are started once per world size and run functions passed by reference.

Every suite that needs several ranks uses them. A fork server starts the processes. It imports torch and Megatron-core
once, and the imports of commands for `commands`.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

TIMEOUT_S = 600.0
MAX_THREADS = 24  # per rank; with more, all ranks are restarted at the cost of forks
RANKS = "TEST_RANKS"  # environment variable: identifies these processes in names of files in a reused directory
TORCH = ("torch", "torch.distributed", "torch._dynamo")  # dispatch modes need Dynamo
ALL = (
    *TORCH,
    "dppo_megatron.train.actor",
    *("dppo_megatron.cli", "dppo_megatron.run.launch.local_run", "dppo_megatron.report.curves"),
    *("transformers.models.auto.tokenization_auto", "matplotlib.figure"),
)


@functools.cache
def fork_server(preload: tuple[str, ...] = ALL) -> ForkServerContext:
    """Return a context that starts processes with `preload` imported. The first call's `preload` is used for all."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


class RankError(Exception):
    """Raised if ranks raised. `raised` is a list of (type name, message)."""

    def __init__(self, raised: list[tuple[str, str]], details: str) -> None:
        super().__init__(details)
        self.raised = raised


class Ranks:
    """Runs `size` processes that wait for functions.

    Without `backend`, the processes have no process group: a function opens a group by `megatron_group`, or by
    `init_layout` after `rendezvous`, and closes it. With `backend`, they keep a group over all ranks. If a function
    does not return in time, the processes are killed, and the next function starts new processes.
    """

    def __init__(self, size: int, backend: str | None = None, preload: tuple[str, ...] = ALL) -> None:
        self.size = size
        self._backend = backend
        self._context = fork_server(preload)
        self._members: list[tuple[Any, Any]] = []  # process, pipe
        self._start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Run function(rank=..., **arguments) on every rank; return results in rank order. Raises RankError."""
        if not self._members:
            self._start()
        for _, pipe in self._members:
            pipe.send((function, arguments))
        answers = self._answers(function.__name__ if hasattr(function, "__name__") else str(function))
        if self._backend is None and self._threads() > MAX_THREADS:
            self.close()
        raised = [(value[0], value[1]) for kind, value in answers if kind == "raised"]
        if raised:
            details = "\n".join(value[2] for kind, value in answers if kind == "raised")
            raise RankError(raised, f"{len(raised)} of {self.size} ranks raised\n{details}")
        return [value for _, value in answers]

    def _threads(self) -> int:
        """Return the highest thread count of any rank.

        Process groups that a function did not close have polling threads. Over several scenarios, they would take a
        core from the tests; six such ranks took a fifth of a core.
        """
        return max(psutil.Process(process.pid).num_threads() for process, _ in self._members)

    def close(self) -> None:
        for _, pipe in self._members:
            pipe.send(None)
        for process, _ in self._members:
            process.join(10)
        self._kill()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = f"{self._folder.name}/store"
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, self.size, store, self._backend, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self._answers("the start")

    def _answers(self, what: str) -> list[tuple[str, Any]]:
        deadline, answers = time.monotonic() + TIMEOUT_S, []
        for rank, (_, pipe) in enumerate(self._members):
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT_S:.0f} s: {what}")
                answers.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, TimeoutError):
                self._kill()
                raise
        return answers

    def _kill(self) -> None:
        for process, pipe in self._members:
            if process.is_alive():
                process.kill()
            pipe.close()
        self._members = []
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, backend: str | None, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    gc.freeze()  # garbage collections would search all imported modules
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ[RANKS] = Path(store).parent.name
    if backend == "nccl":
        torch.cuda.set_device(rank)
    if backend is not None:
        dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    _send(pipe, ("ready", None))
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            answer = ("done", function(rank=rank, **arguments))
        except Exception as error:
            answer = ("raised", (type(error).__name__, str(error), traceback.format_exc() + _locals(error)))
        _send(pipe, answer)
    if backend is not None:
        dist.destroy_process_group()


def _locals(error: Exception) -> str:
    """Return the local variables of a failed assertion; pytest shows only variables of its process."""
    if not isinstance(error, AssertionError):
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "".join(f"{name} = {_shown(value)}\n" for name, value in frame.f_locals.items())


def _shown(value: Any) -> str:
    try:
        return str(value)[:300]
    except Exception:  # for example, for a tensor on a simulated device
        return f"a {type(value).__name__} that cannot be shown"


def _send(pipe: Any, answer: tuple[str, Any]) -> None:
    # Plain pickle: torch would otherwise move each tensor through a separate shared-memory file.
    pipe.send_bytes(pickle.dumps(answer))


@contextmanager
def megatron_group(
    directory: Path, tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None
) -> Iterator[None]:
    """On a rank, open a gloo group over all ranks, and Megatron-core's parallel state with these sizes, on the CPU.

    `directory` is shared by the ranks and must exist. Sharded experts (`ep` > 1) are not tensor-parallel by default.
    """
    from megatron.core import parallel_state, tensor_parallel

    from dppo_megatron.train.actor import without_cuda

    without_cuda.install()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = directory / f"store-{os.environ.get(RANKS, '')}-{rendezvous(directory)}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            vpp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp or (1 if ep > 1 else tp),
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def rendezvous(directory: Path) -> int:
    """On a rank, set MASTER_PORT to a port that rank 0 found. All ranks with this `directory` get this port."""
    rank = int(os.environ["RANK"])
    number = _rendezvous_count[directory] = _rendezvous_count.get(directory, 0) + 1
    note = directory / f"port-{os.environ.get(RANKS, '')}-{number}"
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            note.with_suffix(".tmp").write_text(str(probe.getsockname()[1]))
        note.with_suffix(".tmp").rename(note)
    while not note.exists():
        time.sleep(0.005)
    os.environ["MASTER_PORT"] = note.read_text()
    return number


_rendezvous_count: dict[Path, int] = {}  # directory -> number of rendezvous of this rank
