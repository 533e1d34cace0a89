"""A disk that is really small."""

import shutil
import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 256 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if not shutil.which("mount"):
        pytest.skip("no mount command")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"may not mount a small file system here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
