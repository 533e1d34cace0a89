"""Run worker processes, and replace a process that user code breaks. Only the responsible sample fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dppo_megatron.common.worker import Worker, WorkerError, WorkerTimeout

from .outcome import Failure, describe
from .registry import BUILTIN
from .worker import RewardWorker

if TYPE_CHECKING:
    from dppo_megatron.config.schema import RewardConfig

log = logging.getLogger(__name__)

Result = TypeVar("Result")
AnyWorker = TypeVar("AnyWorker", bound=Worker)


def import_problem(config: RewardConfig) -> str | None:
    """Return why the user's modules cannot be imported or terminate their process, or None if they can be imported."""
    terms = [(term.name, term.settings) for term in config.all_terms if term.name not in BUILTIN]
    if not terms:
        return None
    worker = RewardWorker(terms)
    try:
        return worker.load()
    except WorkerError as error:
        return f"reward.name = {', '.join(name for name, _ in terms)}: importing it: {error}"
    finally:
        worker.end()


def failure_of(error: BaseException) -> Failure:
    """Convert an error in a worker request to a failure.

    Errors other than `WorkerError` come from pickling: it runs foreign code too, and some columns cannot be pickled.
    """
    if isinstance(error, WorkerError):
        return Failure("timeout" if isinstance(error, WorkerTimeout) else "died", str(error))
    return Failure("raised", describe(error))


class WorkerPool(Generic[AnyWorker]):
    """Runs at most `count` processes that import user code. A process starts when a request finds no idle process.

    `start` starts a process. `subject` names the user code in messages.
    """

    def __init__(self, start: Callable[[], AnyWorker], count: int, subject: str):
        self._start_one = start
        self._subject = subject
        self._threads = ThreadPoolExecutor(count, subject)  # each thread waits for one worker
        self._workers: set[AnyWorker] = set()
        self._idle: list[AnyWorker] = []
        self._closed = False

    def submit(self, ask: Callable[..., Result], *arguments: Any) -> Future[Result | Failure]:
        """Call `ask` with a worker and the arguments. The result is the value that `ask` returns, or a failure."""
        return self._threads.submit(self._ask, lambda worker: ask(worker, *arguments))

    def in_thread(self, call: Callable[[], Result]) -> Future[Result]:
        """Run `call` in a thread, where it may wait for a worker. The pool has as many threads as workers."""
        return self._threads.submit(call)

    def lease(self) -> AnyWorker:
        """Return a worker that belongs to the caller until `give_back`. Raises `WorkerError`."""
        return self._idle_worker() or self.start()

    def give_back(self, worker: AnyWorker, *, usable: bool) -> None:
        """Take a worker back. If `usable`, it waits for the next request, otherwise it is terminated."""
        if usable:
            self._idle.append(worker)
        else:
            self._end(worker)

    def close(self) -> None:
        """Terminate the workers at once, including busy workers. May be called again."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in tuple(self._workers):
            worker.end()
        self._threads.shutdown()

    def _ask(self, ask: Callable[[AnyWorker], Result]) -> Result | Failure:
        """Send a request. If it terminates a worker that served earlier requests, repeat it in a new worker.

        A request thus fails only if it times out, or if no earlier request can have damaged the worker.
        """
        try:
            worker = self.lease()
            if not worker.fresh:
                try:
                    return self._keep(worker, ask)
                except WorkerTimeout:
                    raise
                except WorkerError:
                    worker = self.start()
            return self._keep(worker, ask)
        except BaseException as error:
            return failure_of(error)

    def _keep(self, worker: AnyWorker, ask: Callable[[AnyWorker], Result]) -> Result:
        """Send a request, and keep the worker for the next request unless it is unusable."""
        usable = True
        try:
            return ask(worker)
        except WorkerError:
            usable = False
            raise
        finally:
            self.give_back(worker, usable=usable)

    def _idle_worker(self) -> AnyWorker | None:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return None
            if worker.usable:
                return worker
            log.warning("%s: a process ended or wrote to its channel between requests; starting another", self._subject)
            self._end(worker)

    def start(self) -> AnyWorker:
        """Start a worker that belongs to the caller, as with `lease`. Raises `WorkerError`."""
        worker = self._start_one()
        self._workers.add(worker)
        try:
            if self._closed:
                raise WorkerError(f"the {self._subject}s are closed")
            worker.load()  # every reply repeats its error
        except WorkerError:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: AnyWorker) -> None:
        worker.end()
        self._workers.discard(worker)
