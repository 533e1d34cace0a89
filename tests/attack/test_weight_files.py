"""Versions with links or special files: both engines refuse them, and accept the links of sites."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from dppo_megatron.rollout.engines.guard.asgi import Guard, inside_roots
from dppo_megatron.rollout.engines.protocol import EngineRefused
from dppo_megatron.rollout.engines.sglang.client import SglangEngine
from dppo_megatron.run.launch.engine import EngineStartError, _policy_to_serve
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.published import PublishedPolicy
from tests.attack.conftest import SECRET
from tests.attack.test_doors import GOOD, KNOWN, answers, run_config

LINKED = {
    "elsewhere": lambda path, other: path.symlink_to(other),
    "in the directory": lambda path, other: path.symlink_to(path.with_name("other.safetensors")),
    "to a directory": lambda path, other: path.symlink_to(other.parent),
    "to nothing": lambda path, other: path.symlink_to("/nowhere"),
    "fifo": lambda path, other: os.mkfifo(path),
    "socket": lambda path, other: socket.socket(socket.AF_UNIX).bind(str(path)),
}


@pytest.mark.parametrize("name", ["model.safetensors", ".model.safetensors", "config.json", "delta.json"])
@pytest.mark.parametrize("kind", LINKED)
@pytest.mark.parametrize("delta", [False, True], ids=["version", "the version that a delta changes"])
def test_weights_are_loaded_only_from_regular_files(served, tmp_path, monkeypatch, name, kind, delta):
    """Both engines' guards: a version of links was loaded, and a FIFO was waited for."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "other.safetensors"
    other.touch()
    weights = served.run / "weights"
    (weights / "v1").mkdir()
    (weights / "v1" / "other.safetensors").touch()
    LINKED[kind](Path(os.path.relpath(weights / "v1" / name)) if kind == "socket" else weights / "v1" / name, other)
    if delta:
        (weights / "v2").mkdir()
        (weights / "v2" / "delta.json").write_text('{"format": 1, "base": "v1"}')
    check_refused(served, weights / ("v2" if delta else "v1"), f"v1/{name}: is a link or a special file")


def test_a_delta_that_changes_a_link_is_refused(served, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    weights = served.run / "weights"
    (weights / "v1").symlink_to(tmp_path / "elsewhere")
    (weights / "v2").mkdir()
    (weights / "v2" / "delta.json").write_text('{"format": 1, "base": "v1"}')
    check_refused(served, weights / "v2", "v1: is a link or a special file")


def check_refused(served, path: Path, reason: str) -> None:
    body = GOOD["load_weights"] | {"path": str(path), "version": 37}
    (reply,) = answers(served.app, [("POST", "/dppo/load_weights", {"headers": KNOWN, "json": body})])
    assert reply.status_code == 400
    assert reason in reply.json()["error"]
    assert not served.engine.called

    async def sglang(*_):
        raise AssertionError("let in")

    guard = Guard(sglang, secret=SECRET, paths={"/load": "model_path"}, roots=[str(served.run)])
    (reply,) = answers(guard, [("POST", "/load", {"headers": KNOWN, "json": {"model_path": str(path)}})])
    assert (reply.status_code, reason in reply.json()["error"]) == (400, True)
    engine = SglangEngine(run_config(served.run), "http://engine")
    with pytest.raises(EngineRefused, match=reason):  # before it asks the server, which would have paused
        asyncio.run(engine.load_weights(path, 37))
    run = RunDir(served.run)
    PublishedPolicy(37, str(path), 0.0).write(run.published)
    with pytest.raises(EngineStartError, match=f"policy 37: .*{reason}"):  # of an engine that starts again
        _policy_to_serve(run_config(served.run), run, 0)


def test_a_mounted_run_and_a_start_model_of_links_are_served(tmp_path):
    """Paths to a run, RUN/weights and a model cache's snapshots may be links."""
    (tmp_path / "memory" / "v1").mkdir(parents=True)
    (tmp_path / "memory" / "v1" / "model.safetensors").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights").symlink_to(tmp_path / "memory")
    (tmp_path / "mount").symlink_to(tmp_path)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "memory" / "v1" / "model.safetensors")
    roots = [str(tmp_path / "run"), str(tmp_path / "mount" / "run" / "weights"), str(tmp_path / "snapshot")]
    for path in ("mount/run/weights/v1", "run/weights/v1", "snapshot", "mount/snapshot"):
        assert inside_roots(str(tmp_path / path), roots) == str((tmp_path / path).resolve())
