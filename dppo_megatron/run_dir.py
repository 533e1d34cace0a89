"""Define the paths in a run directory. All run files are there, so `ls` shows the run state."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from dppo_megatron.common.file_lock import FileLock, LockHeld
from dppo_megatron.common.files import read_regular
from dppo_megatron.errors import ExpectedError

ENDING_S, POLL_S = 60.0, 0.2  # longest wait until the processes of a killed launcher end, and the poll interval


def run_below(directory: Path) -> str:
    """Return a hint at a run in the parent or a subdirectory, as in a project; "" if `directory` is a run."""
    around = [directory.absolute().parent / "run.lock", *sorted(directory.glob("*/run.lock"))]
    locks = [] if (directory / "run.lock").exists() else [lock for lock in around if lock.exists()]
    return f"; did you mean {locks[0].parent}?" if locks else ""


class _Below:
    """Defines a path below the run root: `RunDir(root).config` is `root / "config.yaml"`."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, run: RunDir, _: type) -> Path:
        return run.root / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    root: Path

    config = _Below("config.yaml")
    files = _Below("files.json")  # digests of files that settings name, see `run/checks/resume.py`
    secret = _Below("secret")  # secret token that the run's engines require; mode 0600
    bank = _Below("bank")
    open_turns = _Below("open_turns")  # journals: environment turns in groups that are not in the bank yet
    weights = _Below("weights")
    published = _Below("weights/published.json")
    quantized_start = _Below("weights/start")  # quantized start model, with which engines start
    lock = _Below("run.lock")  # locked by the launcher
    checkpoints = _Below("checkpoints")
    logs = _Below("logs")
    flight_recorder = _Below("logs/nccl_trace_rank_")  # plus the rank: torch's record of the rank's last collectives
    services = _Below("services")
    metrics = _Below("metrics.jsonl")
    rollout_metrics = _Below("rollout_metrics.jsonl")
    masked_tokens = _Below("masked_tokens.jsonl")
    answers = _Below("answers")  # evaluation answers, by set and policy version
    tokens = _Below("tokens")  # per-token values of some sequences, see `train/trainer/token_log.py`
    profile = _Below("profile")
    restarts = _Below("restarts.jsonl")  # start and end of each attempt
    heartbeats = _Below("heartbeats")  # for each trainer rank, see `common/heartbeat.py`
    finished = _Below("finished")  # number of steps, if the run ended without a checkpoint (`checkpoint.final`)
    final_model = _Below("model")
    final_adapter = _Below("adapter")  # final adapter, with `model.lora`; the final model has it merged

    def make(self) -> None:
        """Create the directory with mode 0700; an existing directory keeps its mode. Raises `ExpectedError`."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ExpectedError(
                f"run.dir = {self.root}: cannot be made: {error.strerror}; choose another run.dir"
            ) from None

    def take(self, wait_s: float = 0.0) -> FileLock:
        """Create the directory and acquire `run.lock`, because two launchers would mix their metrics.

        The run's processes inherit the lock. A resume right after a kill therefore waits, up to `ENDING_S`, for
        processes that still write. wait_s: the longest wait for any other holder. On a file system without locks,
        nothing is locked. Raises `ExpectedError` naming the holder.
        """
        self.make()
        path, started = self.lock, time.monotonic()
        while True:
            try:
                return FileLock(path, needed=False)
            except LockHeld as held:
                # `FileLock.is_held` in another process takes the lock for a moment.
                if time.monotonic() - started > max(wait_s, ENDING_S if held.ended else POLL_S):
                    ended = ", which ended, but processes that it started still run" if held.ended else ""
                    raise ExpectedError(
                        f"run.dir = {self.root}: this run is in use by {held}{ended}; stop it (`kill PID` on that "
                        "host, or `scancel` its job), or choose another run.dir"
                    ) from None
                time.sleep(POLL_S)
            except OSError as error:
                raise ExpectedError(f"run.dir = {path}: {error.strerror}; correct its permissions") from None

    @property
    def checkpoint_step(self) -> int | None:
        """Return the newest checkpoint's number of finished steps, by the checkpoint name; None if none is readable."""
        return self._steps(self.checkpoints / "latest")

    def _steps(self, file: Path) -> int | None:
        try:
            return int(read_regular(file, 100).rpartition(b"-")[2])
        except (FileNotFoundError, ValueError):
            return None

    @property
    def done(self) -> int:
        """Return the number of finished steps, from the newest checkpoint or from `finished`, if that has more."""
        return max(self.checkpoint_step or 0, self._steps(self.finished) or 0)

    def teacher(self, name: str) -> Path:
        """Return the run directory for a teacher that the run serves."""
        return self.root / "teachers" / name

    def model(self, path: str | None) -> Path | None:
        """Return the model directory: `path`, the run's model.path, or else the final model; None without either.

        A relative path may start at the working directory or at any directory above the run.
        """
        places = [base / path for base in (Path(), *self.root.absolute().parents)] if path else []
        return next((place for place in (*places, self.final_model) if (place / "config.json").is_file()), None)

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def weights_of(self, version: int) -> Path:
        return self.weights / f"v{version:06d}"

    def version_of(self, weights: Path) -> int:
        """Return the policy version in a directory name that `weights_of` made."""
        return int(weights.name[1:])
