"""A reader follows files that another host appends to."""

from __future__ import annotations

import pytest

from dppo_megatron.bank import BankCorruption, BankReader, BankWriter
from dppo_megatron.bank import reader as bank_reader
from tests.support.bank import make_group


def test_a_line_whose_bytes_come_late_is_waited_for_on_a_network_file_system_alone(tmp_path, monkeypatch):
    """A later page may arrive before an earlier one."""
    with BankWriter(tmp_path, 2) as writer:
        writer.append(make_group(0))
        reader = BankReader(tmp_path)
        assert reader.refresh() == 1
        writer.append(make_group(1))
        index = tmp_path / "segment-000000.jsonl"
        whole = index.read_bytes()
        first = whole.index(b"\n", whole.index(b"\n") + 1) + 1
        index.write_bytes(whole[:first] + bytes(40) + whole[first + 40 :])
        with pytest.raises(BankCorruption, match=r"line 3: damaged"):
            reader.refresh()
        monkeypatch.setattr(bank_reader, "is_local", lambda _: False)
        assert reader.refresh() == 1
        index.write_bytes(whole)
        assert reader.refresh() == 2
        index.write_bytes(whole[:first] + bytes(40) + whole[first + 40 :])
        late = BankReader(tmp_path)
        assert late.refresh() == 1
        monkeypatch.setattr(bank_reader, "LAG_S", 0.0)
        with pytest.raises(BankCorruption, match=r"line 3: damaged"):
            late.refresh()
        index.write_bytes(whole)
