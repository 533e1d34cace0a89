"""Every extra and every lock, resolved against the package index by uv, as pip would on a GPU machine."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu_locks
import pytest
from gpu_locks import GLIBC, NO_WHEEL, Resolution, extras, read_lock, requirements, resolve, uv

from tests.install.combinations import COMBINATIONS

pytestmark = pytest.mark.registry
ROOT = Path(__file__).parents[2]
EXCLUDE_EACH_OTHER = ("vllm", "sglang")
GPU, TE, SGLANG = (read_lock(ROOT / "requirements" / f"{name}.lock") for name in ("gpu", "te", "sglang-gpu"))


def pinned(lock: dict[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in lock.items()]


def why_not() -> str | None:
    if uv() is None:
        return "uv is not installed (make install)"
    command = [str(uv()), "--no-config", "pip", "compile", "--quiet", "--refresh-package", "six"]
    command += ["--python", sys.executable, "--no-python-downloads", "-"]
    environment = {**os.environ, "UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "0"}
    done = subprocess.run(command, input="six", capture_output=True, text=True, timeout=900, env=environment)
    return f"no package index is reachable: {' '.join(done.stderr.split())[-200:]}" if done.returncode else None


@pytest.fixture(scope="module")
def resolutions() -> dict[object, Resolution]:
    """All at once, because each is waiting for the index."""
    if reason := why_not():
        pytest.skip(reason)
    jobs: dict[object, dict] = {
        names: {"wanted": requirements(*names), "glibc": GLIBC.get("sglang" if "sglang" in names else "", "2_31")}
        for names in COMBINATIONS
    }
    jobs["te, compiled"] = {
        "wanted": requirements(*gpu_locks.GPU, "te"),
        "constraints": pinned(GPU | TE),
        "build": True,
    }
    jobs["gpu.lock"] = {"wanted": requirements(*gpu_locks.GPU), "constraints": pinned(GPU)}
    jobs["sglang-gpu.lock"] = {"wanted": extras()["sglang"], "constraints": pinned(SGLANG), "glibc": GLIBC["sglang"]}
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = {key: pool.submit(resolve, **arguments) for key, arguments in jobs.items()}
        return {key: future.result() for key, future in running.items()}


@pytest.mark.parametrize("names", [c for c in COMBINATIONS if c not in (("te",), EXCLUDE_EACH_OTHER)], ids=",".join)
def test_wheels_for_a_documented_combination_of_extras_exist(resolutions, names):
    found = resolutions[names]
    assert not found.error, found.error
    assert NO_WHEEL not in found.pins


def test_vllm_and_sglang_exclude_each_other_as_documented(resolutions):
    error = resolutions[EXCLUDE_EACH_OTHER].error
    assert "sglang>=0.5.23" in error
    assert "are incompatible" in error, error


def test_transformer_engine_lacks_one_wheel_only(resolutions):
    assert f"Wheels are required for `{NO_WHEEL}`" in resolutions[("te",)].error
    found = resolutions["te, compiled"]
    assert not found.error, found.error
    assert found.pins == GPU | TE


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "lock"), [("gpu.lock", GPU), ("sglang-gpu.lock", SGLANG)])
def test_a_lock_is_complete_and_consistent(resolutions, name, lock):
    """Resolved with the lock as constraint, the result is the lock: nothing contradicts, lacks or is too much."""
    found = resolutions[name]
    assert not found.error, found.error
    assert found.pins == lock
