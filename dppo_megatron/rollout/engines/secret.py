"""Create and read the run's secret, stored in a single file. Every request to the engines must have the secret."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from functools import partial
from pathlib import Path

from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.run_dir import RunDir

log = logging.getLogger(__name__)

WRITTEN_S = 5.0  # time for another process, which created the file at the same time, to write the secret


class NoSecret(ExpectedError, RuntimeError):
    """The run's secret cannot be read from its file."""


def make_secret(config: Config) -> None:
    """Create RUN/secret unless it exists or `engine.secret_file` names another file.

    If several processes call this at once, only one creates the file. Raises `NoSecret` if the file has no readable
    secret.
    """
    run = RunDir(config.run.dir)
    run.make()
    path, remedy = config.engine.secret_file or run.secret, "write another into it, and give it to the servers"
    if config.engine.secret_file is None:
        remedy = "remove it, and the next start creates another"
        owner_only = partial(os.open, mode=0o600)
        with contextlib.suppress(FileExistsError), open(path, "x", opener=owner_only) as file:
            file.write(secrets.token_urlsafe(32))
            file.flush()
            os.fsync(file.fileno())
    _close_to_others(path, remedy)
    try:
        secret = wait_until(lambda: _read(path), WRITTEN_S, 0.05)
    except PermissionError:
        raise NoSecret(f"{path}: this user cannot read it; start the command as the run's user") from None
    if not secret:
        raise NoSecret(f"{path}: is empty; {remedy}")


def read_secret(config: Config) -> str | None:
    """Return the engines' secret, or None if it is unreadable or RUN/secret is absent; engines then reject requests.

    Raises `NoSecret` if the secret cannot be sent in a header, or if `engine.secret_file` does not exist.
    """
    try:
        return _read(config.engine.secret_file or RunDir(config.run.dir).secret) or None
    except PermissionError:
        return None
    except FileNotFoundError:
        if config.engine.secret_file is None:
            return None
        raise NoSecret(f"engine.secret_file = {config.engine.secret_file}: no such file; correct the path") from None


def _close_to_others(path: Path, remedy: str) -> None:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        raise NoSecret(f"engine.secret_file = {path}: no such file; correct the path") from None
    if mode & 0o077:
        with contextlib.suppress(OSError):  # it belongs to another user, or the file system is read-only
            path.chmod(0o600)
        log.warning("%s could be read by others (mode %o); %s", path, mode, remedy)


def _read(path: Path) -> str:
    """Return one line of printable ASCII. Raises `NoSecret` for any other content.

    An HTTP client's error about an invalid header would show the secret.
    """
    secret = path.read_bytes().decode("ascii", errors="replace").strip()
    if not (secret.isascii() and secret.isprintable()):
        raise NoSecret(f"{path}: must be one line of ASCII; leave only the secret in it")
    return secret
