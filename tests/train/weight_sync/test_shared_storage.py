"""Which versions are written as a delta, and of which one."""

from types import SimpleNamespace

import pytest

from dppo_megatron.train.weight_sync.shared_storage import SharedStorage
from tests.support.configs import make_config


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A storage without files, and its log: the base of each delta, or None for a whole model."""
    log: list[str | None] = []

    def whole(self, directory):
        self.changed_share = None
        log.append(None)

    def delta(self, directory, base):
        self.changed_share = 0.1
        log.append(base.name)
        return True

    monkeypatch.setattr(SharedStorage, "_save_whole", whole)
    monkeypatch.setattr(SharedStorage, "_save_delta", delta)
    config = make_config(run={"dir": str(tmp_path)}, weight_sync={"full_every": 9})
    return SharedStorage(config, None, SimpleNamespace(rank=1)), log


def test_a_version_that_is_prepared_again_is_no_delta_of_itself(written):
    storage, log = written
    for version in (0, 1, 1, 2):
        storage.prepare(version)
    assert log == [None, "v000000", None, "v000001"]


def test_a_delta_that_no_engine_loaded_is_replaced_by_the_whole_model(written):
    storage, log = written
    for version in (0, 1):
        storage.prepare(version)
        storage.prepare_again(version)
    assert log == [None, "v000000", None]
