"""The orchestrator on a disk that does not answer."""

from __future__ import annotations

import os
import threading

import pytest

from dppo_megatron.bank import BankTimeout
from dppo_megatron.orchestrator import orchestrator
from tests.support.fakes.orchestrator import World, sampling_config


def test_a_disk_that_does_not_answer_is_named_while_it_does_not(tmp_path, monkeypatch):
    """Closing the bank waits for the write, so what is raised is seen only once the disk is well again."""
    w = World(sampling_config(tmp_path / "run", steps=1))
    real, named = os.pwritev, threading.Event()

    def pwritev(*call):
        if threading.current_thread().name.startswith("bank-writer"):
            named.wait(2)
        return real(*call)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(orchestrator, "LONGEST_WRITE_S", 0.1)
    monkeypatch.setattr(orchestrator.log, "error", lambda *_: named.set())
    with pytest.raises(BankTimeout, match="does not answer"):
        w.run_attempt(w.engine())
    assert named.is_set()
