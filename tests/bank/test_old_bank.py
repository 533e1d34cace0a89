"""A bank of format 1, which was never released, is rejected with one clear error."""

from __future__ import annotations

import pytest

from dppo_megatron.bank import BankCorruption, BankError, BankReader, BankWriter
from dppo_megatron.bank.audit import audit_bank

LINE = b'{"kind":"group","position":0,"row":0,"offset":0,"bytes":8,"crc32":1,"n":1}\n'


def test_a_bank_of_format_1_is_rejected_by_all_that_open_it(tmp_path):
    (tmp_path / "segment-000000.jsonl").write_bytes(LINE)
    (tmp_path / "segment-000000.bin").write_bytes(b"\0" * 8)
    for opened in (lambda: BankWriter(tmp_path, 3), lambda: BankReader(tmp_path).refresh()):
        with pytest.raises(BankError, match="bank format 1, this version reads only format 2; continue") as raised:
            opened()
        assert not isinstance(raised.value, BankCorruption)
    ((_, _, found),) = audit_bank(tmp_path)
    assert ["bank format 1" in problem for problem in found.problems] == [True]
    (tmp_path / "head.json").write_text('{"format": 2, "segment": 0}')
    with pytest.raises(BankCorruption, match="line 1: damaged: its crc32 does not match"):
        BankReader(tmp_path).refresh()
