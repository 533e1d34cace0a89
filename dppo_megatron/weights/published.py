"""Record the policy that the engines serve.

The trainer writes the record after engines confirm the policy. The orchestrator reads the record.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dppo_megatron.common.files import parse_as, read_as, write_json
from dppo_megatron.common.retry import look_again_s
from dppo_megatron.errors import ExpectedError


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    version: int  # training steps behind these weights
    path: str | None  # Hugging Face directory; None if the weights were broadcast
    published_at: float  # unix seconds
    confirmed: dict[str, str] = field(default_factory=dict)  # URL -> instance of each engine seen to serve this version
    probe_tokens: list[int] = field(default_factory=list)  # [P]; empty = not recorded
    probe_logprobs: list[float] = field(default_factory=list)  # [P - 1], computed by the trainer
    fingerprint: dict[str, int] | None = None  # `weights.fingerprint` of the sent weights; None = not recorded

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> PublishedPolicy | None:
        """Return the published policy, or None if there is none yet. Raises `DamagedFile`."""
        return read_as(cls, path)


class PolicyTimeout(ExpectedError, TimeoutError):
    """No newer policy was published in time."""


class PublishedFollower:
    """Follows the published-policy file, and reads it again only when modification time or inode change.

    `progress` returns a value that changes while the trainer advances. A wait ends after `timeout_s` without a new
    version or progress.
    """

    def __init__(self, path: Path, timeout_s: float, progress: Callable[[], object] = lambda: None):
        self._path = path
        self._timeout_s = timeout_s
        self._progress = progress
        self._fingerprint: tuple[int, int] | None = None
        self._current: PublishedPolicy | None = None

    @property
    def current(self) -> PublishedPolicy | None:
        try:
            # Opened each time: network file systems revalidate their caches on open, not on stat.
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                fingerprint = (stat.st_mtime_ns, stat.st_ino)
                if fingerprint != self._fingerprint:
                    self._current = parse_as(PublishedPolicy, file.read(), self._path)
                    self._fingerprint = fingerprint
        except OSError as error:
            # The file is missing, or was replaced while it was opened; the next poll reads it.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        return self._current

    async def wait_for(self, version: int) -> PublishedPolicy:
        """Wait for a policy of at least `version`, and return it.

        Raises `PolicyTimeout` when neither a new version, with any number, nor progress appeared within the timeout.
        """
        last, began = (self.current, self._progress()), time.monotonic()
        since = next_check = began
        while True:
            policy = self.current
            if policy is not None and policy.version >= version:
                return policy
            now = time.monotonic()
            progress = last[1]
            if now > next_check:
                progress, next_check = self._progress(), now + self._timeout_s / 20
            if (policy, progress) != last:
                last, since = (policy, progress), now
            if now - since > self._timeout_s:
                have = "none" if policy is None else f"version {policy.version}"
                raise PolicyTimeout(
                    f"no progress of the trainer for {self._timeout_s:.0f} s (see run.stall_timeout_s), while the next "
                    f"step waits for policy version {version} in {self._path}, found {have}; see the trainer's log"
                )
            await asyncio.sleep(look_again_s(now - began))
