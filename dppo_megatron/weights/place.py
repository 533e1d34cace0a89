"""Choose the directory for weight versions: RUN/weights, or `weight_sync.directory`, to which RUN/weights then links.

Readers therefore need only the run directory. The other directory may be on shared memory such as /dev/shm. It is made
with mode 0700, never through another user's link, and belongs to a single run.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from dppo_megatron.errors import ExpectedError
from dppo_megatron.run_dir import RunDir

from .published import PublishedPolicy

SETTING = "weight_sync.directory"
OWNER = "run"  # file with the run name
_OURS = re.compile(r"v\d+|\.v\d+\..*|start|\.start\..*|published\.json|" + OWNER)


def problem(run: RunDir, directory: Path) -> str | None:
    """Return why versions cannot be written to `directory`, or None. Makes no changes."""
    setting, directory = f"{SETTING} = {directory}", directory.absolute()
    parent = directory.parent
    if not parent.is_dir():
        return f"{setting}: {parent} is not a directory; create it, or choose another one"
    status = parent.stat()
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return f"{setting}: any user may replace files in {parent} (it is not sticky); choose another one"
    if directory.parent.resolve() / directory.name == run.weights.parent.resolve() / run.weights.name:
        return f"{setting}: this is the default place of the versions; remove the setting"
    if not os.path.lexists(directory):
        if os.access(parent, os.W_OK | os.X_OK):
            return None
        return f"{setting}: {parent} cannot be written here; choose another one"
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{setting}: is a link or a file, not a directory; remove it, or choose another one"
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        return (
            f"{setting}: other users may read or write it; it must be yours, with mode 0700; choose one that does not "
            "exist"
        )
    owner = _owner(directory)
    if owner is None and any(directory.iterdir()):
        return f"{setting}: has files that no run wrote; choose an empty one, or one that does not exist"
    if owner not in (None, _name(run)):
        return (
            f"{setting}: belongs to the run {owner}; choose another one for each run, or remove it if that run is over"
        )
    return None


def lead(run: RunDir, directory: Path | None) -> None:
    """Make RUN/weights a link to `directory`, or a directory itself if `directory` is None.

    Creates `directory` if it does not exist. Removes the versions that an earlier attempt wrote elsewhere. May be
    called repeatedly. Raises `ExpectedError`.
    """
    link_target = run.weights.readlink() if run.weights.is_symlink() else None
    if directory is None:
        clear(run)
        if run.weights.is_symlink() and not run.weights.exists():
            raise ExpectedError(f"{run.weights}: links to {link_target}, which does not exist; remove the link")
        run.weights.mkdir(parents=True, exist_ok=True)
        return
    directory = directory.absolute()
    if message := problem(run, directory):
        raise ExpectedError(message)
    try:
        make = partial(directory.mkdir, 0o700, exist_ok=True)  # mkdir follows no link
        for prepare in (make, partial(_claim, run, directory)):
            prepare()
            if message := problem(run, directory):  # another process may have made it first
                raise ExpectedError(message)
        if link_target == directory:
            return
        clear(run)
        if run.weights.is_symlink():  # a link made by the user
            run.weights.unlink()
        elif run.weights.exists():
            _remove_versions(run.weights)
            run.weights.rmdir()
        run.make()
        run.weights.symlink_to(directory)
    except OSError as error:
        raise ExpectedError(f"{SETTING} = {directory}: {error}; choose another one") from None


def clear(run: RunDir) -> None:
    """Remove the versions from the directory that `lead` linked to, when a run or an attempt ends.

    The last version number stays in RUN/weights.
    """
    if not run.weights.is_symlink():
        return
    directory = run.weights.readlink()
    if _owner(directory) != _name(run):  # a link made by the user
        return
    last = PublishedPolicy.read(run.published)
    run.weights.unlink()
    run.weights.mkdir()
    if last is not None:
        replace(last, path=None).write(run.published)
    _remove_versions(directory)
    directory.rmdir()


def _remove_versions(directory: Path) -> None:
    """Remove all versions. Raises `ExpectedError` if the directory has other files."""
    if foreign := [path.name for path in directory.iterdir() if not _OURS.fullmatch(path.name)]:
        raise ExpectedError(f"{directory}: has {foreign[0]}, which is not a published version; move it away")
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _name(run: RunDir) -> str:
    return str(run.root.resolve())


def _owner(directory: Path) -> str | None:
    try:
        return (directory / OWNER).read_text()
    except FileNotFoundError:
        return None


def _claim(run: RunDir, directory: Path) -> None:
    with suppress(FileExistsError), open(directory / OWNER, "x") as file:
        file.write(_name(run))
