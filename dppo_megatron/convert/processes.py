"""A conversion in this process, in one of several that torchrun or srun started, or in several started here."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable

from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf import ModelError

from .job import Conversion, Worker, prepare, run
from .progress import Progress


def convert(
    build: Callable[[], Conversion], *, resume: bool = False, processes: int = 1, worker: Worker | None = None
) -> Conversion | None:
    """Runs the conversion that `build` makes; `build` must be picklable when `processes` > 1.

    `worker` is which of the processes this is; default: the first of `processes`, or as the environment names it.

    Returns it where this process published it, None on the other ranks of torchrun or srun. Raises `ModelError`
    as `build`, `prepare` and `run` do.
    """
    worker = worker or Worker.from_environment()
    if worker.size > 1:
        processes = 1  # they were started already
    elif processes > 1:
        worker = Worker(0, processes)
    conversion = build()
    if worker.rank == 0:
        prepare(conversion, resume)
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_work, args=(build, Worker(rank, processes)), daemon=True)
        for rank in range(1, processes)
    ]

    def watch() -> None:
        for rank, other in enumerate(others, 1):
            if other.exitcode:
                raise ModelError("conversion", [f"process {rank} of {processes} ended with exit code {other.exitcode}"])

    for other in others:
        other.start()
    try:
        with Progress(conversion.destination.name, conversion.nbytes, silent=worker.rank > 0) as progress:
            run(conversion, worker, progress, watch)
    finally:
        for other in others:
            other.terminate()  # on success it has nothing left to do
            other.join()
    return conversion if worker.rank == 0 else None


def _work(build: Callable[[], Conversion], worker: Worker) -> None:
    conversion = build()
    try:
        run(conversion, worker, Progress("", conversion.nbytes, silent=True))
    except ExpectedError:
        sys.exit(1)  # process 0 reports it
