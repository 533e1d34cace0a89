"""Our plug-in reads a delta ahead of the load, inside an SGLang scheduler."""

import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dppo_megatron.rollout.engines.guard.asgi import ROOTS_VARIABLE
from dppo_megatron.rollout.engines.sglang.plugin import dppo_sglang_plugin as plugin
from dppo_megatron.weights import delta
from tests.weights.test_delta import stored

NAMES = [f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("norm", "mlp.up_proj", "mlp.down_proj")]
CHANGED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def versions(tmp_path, monkeypatch) -> list[Path]:
    """A model, and two deltas of one tensor."""
    monkeypatch.setenv(ROOTS_VARIABLE, str(tmp_path))
    tensors = {name: torch.randn(8, 8) for name in NAMES}
    (tmp_path / "v0").mkdir()
    save_file(tensors, tmp_path / "v0" / "model.safetensors")
    for number in (1, 2):
        tensors = {name: tensor + (name == CHANGED) for name, tensor in tensors.items()}
        stored(tmp_path / f"v{number}", tmp_path / f"v{number - 1}", tensors)
    return [tmp_path / f"v{number}" for number in range(3)]


class Server:
    """The part of a scheduler that the plug-in touches."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1)
        self.holds: dict[str, torch.Tensor] = {}
        self.updater = SimpleNamespace(
            get_model=lambda: self.model, get_model_runner=lambda: SimpleNamespace(lora_manager=None)
        )

    def read(self, directory: Path) -> str:
        assert plugin.read_ahead(self.model, "1000000", str(directory)) == plugin.READING
        deadline = time.monotonic() + 10
        while (state := plugin.has_read(self.model)) == plugin.READING:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return state

    def update(self, directory: Path) -> tuple[bool, str]:
        return plugin.update_from_disk(self._load, self.updater, str(directory), "auto")

    def _load(self, updater, model_path: str, load_format: str) -> tuple[bool, str]:
        source = SimpleNamespace(model_or_path=model_path, prefix="")
        original = lambda loader, source: delta.Version(Path(source.model_or_path)).tensors()  # noqa: E731
        self.holds = dict(plugin.weights_iterator(original, None, source))
        return True, "loaded"

    def is_at(self, directory: Path) -> bool:
        expected = dict(delta.Version(directory).tensors())
        return all(torch.equal(self.holds[name], tensor) for name, tensor in expected.items())


def test_a_version_that_was_read_ahead_is_loaded_without_a_second_read(versions, monkeypatch):
    server = Server()
    for directory in versions:
        assert server.read(directory) == plugin.READ
        with monkeypatch.context() as patched:
            if directory != versions[0]:
                patched.setattr(delta, "checksum", lambda tensor: pytest.fail("read in the pause"))
            assert server.update(directory)[0]
        assert server.is_at(directory)
    assert server.update(versions[1])[0], "nothing was read ahead"
    assert server.is_at(versions[1])


def test_a_delta_that_was_read_ahead_is_not_loaded_after_whole_weights_replaced_it(versions):
    """The trainer writes the whole when no engine loaded a delta."""
    server = Server()
    server.read(versions[2])
    tensors = {name: torch.randn(8, 8) for name in NAMES}
    shutil.rmtree(versions[2])
    versions[2].mkdir()
    save_file(tensors, versions[2] / "model.safetensors")
    assert server.update(versions[2])[0]
    assert all(torch.equal(server.holds[name], tensor) for name, tensor in tensors.items())


def test_damage_and_foreign_paths_are_reported_before_anything_is_loaded(versions, tmp_path, monkeypatch):
    server = Server()
    server.update(versions[0])
    file = versions[1] / "part.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "DamagedDelta" in server.read(versions[1])
    assert server.is_at(versions[0])
    monkeypatch.setenv(ROOTS_VARIABLE, str(tmp_path / "elsewhere"))
    assert "weights are loaded only from" in plugin.read_ahead(server.model, "1", str(versions[2]))
