"""Where a run keeps what. One directory holds all of it, so `ls` shows the state of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from dppo_megatron.common.file_lock import FileLock, LockHeld
from dppo_megatron.common.files import read_regular
from dppo_megatron.errors import ExpectedError

ENDING_S, POLL_S = 60.0, 0.2  # for the processes of a launcher that was killed to end


@dataclass(frozen=True, slots=True)
class RunDir:
    root: Path

    def make(self) -> None:
        """The directory, for its owner alone. One that is there keeps its mode. Raises `ExpectedError`."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ExpectedError(
                f"run.dir = {self.root}: cannot be made: {error.strerror}; choose another run.dir"
            ) from None

    def take(self, wait_s: float = 0.0) -> FileLock:
        """Make the directory and take its lock, `run.lock`: two launchers would mix their metrics.

        Processes of the run inherit it, so a resume right after a kill waits, up to `ENDING_S`, for processes that
        still write. wait_s: for any holder. Without effect on a file system without locks. Raises `ExpectedError`
        that names the holder.
        """
        self.make()
        path, started = self.root / "run.lock", time.monotonic()
        while True:
            try:
                return FileLock(path, needed=False)
            except LockHeld as held:
                if time.monotonic() - started > max(wait_s, ENDING_S if held.ended else 0.0):
                    ended = ", which ended, but processes that it started still run" if held.ended else ""
                    raise ExpectedError(
                        f"run.dir = {self.root}: this run is in use by {held}{ended}; stop it (`kill PID` on that "
                        "host, or `scancel` its job), or choose another run.dir"
                    ) from None
                time.sleep(POLL_S)
            except OSError as error:
                raise ExpectedError(f"run.dir = {self.root}: {path}: {error.strerror}; mend its permissions") from None

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def secret(self) -> Path:
        """What a request must bring to the run's engines; of mode 0600."""
        return self.root / "secret"

    @property
    def bank(self) -> Path:
        return self.root / "bank"

    @property
    def open_turns(self) -> Path:
        """The journals of groups that take turns with an environment and are not in the bank yet."""
        return self.root / "open_turns"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def published(self) -> Path:
        return self.weights / "published.json"

    @property
    def quantized_start(self) -> Path:
        """The start model as quantised engines start with it."""
        return self.weights / "start"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def checkpoint_step(self) -> int | None:
        """Steps done in the newest whole checkpoint, without reading it; None before the first, or when unreadable."""
        try:
            return int(read_regular(self.checkpoints / "latest", 100).rpartition(b"-")[2])
        except (FileNotFoundError, ValueError):
            return None

    def done(self, steps: int) -> bool:
        """Whether a run of so many steps ended with its last one; a trainer that is stopped exits 0, too."""
        return (self.checkpoint_step or 0) >= steps

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def services(self) -> Path:
        return self.root / "services"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def rollout_metrics(self) -> Path:
        return self.root / "rollout_metrics.jsonl"

    @property
    def answers(self) -> Path:
        """Of evaluations, by set and policy version."""
        return self.root / "answers"

    @property
    def tokens(self) -> Path:
        """What the trainer saw of every token of some sequences, see `trainer/token_log.py`."""
        return self.root / "tokens"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def restarts(self) -> Path:
        return self.root / "restarts.jsonl"

    @property
    def final_model(self) -> Path:
        return self.root / "model"

    def model(self, path: str | None) -> Path | None:
        """The model directory that `path`, the run's model.path, names: as it is; for a relative one of another working
        directory, below a directory above the run; else the run's final model. None where there is none of them."""
        places = [base / path for base in (Path(), *self.root.absolute().parents)] if path else []
        return next((place for place in (*places, self.final_model) if (place / "config.json").is_file()), None)

    @property
    def final_adapter(self) -> Path:
        """Of a run with `model.lora`, whose final model has it merged."""
        return self.root / "adapter"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def weights_of(self, version: int) -> Path:
        return self.weights / f"v{version:06d}"

    def version_of(self, weights: Path) -> int:
        """Of a directory that `weights_of` names."""
        return int(weights.name[1:])
