"""The memory of a rank while it reads a step from the bank."""

from dataclasses import fields

import pytest
import torch

from dppo_megatron.bank import BankReader, ReadBuffer
from dppo_megatron.train.trainer import batches
from dppo_megatron.train.trainer.batches import BankBatches
from dppo_megatron.types import TokenBatch

from .test_bank_batches import long_batches


def source_of(tmp_path) -> BankBatches:
    """Return the source of rank 0 of 2; its share of a step is several micro-batches."""
    return long_batches(tmp_path, 4, tokens=1100)(0, 2)


def test_a_rank_packs_its_samples_before_it_reads_more(tmp_path, monkeypatch):
    """A rank keeps its share as tensors, and the bank's bytes of only one micro-batch."""
    source = source_of(tmp_path)
    happened = []
    read, pack = BankReader.read, batches.pack

    def noted_read(self, entry, samples, *rest):
        happened.append(len(samples))
        return read(self, entry, samples, *rest)

    def noted_pack(sequences, **settings):
        happened.append(-len(sequences))
        return pack(sequences, **settings)

    monkeypatch.setattr(BankReader, "read", noted_read)
    monkeypatch.setattr(batches, "pack", noted_pack)
    (update,) = source.read(0).updates
    assert len(update.micro_batches) > 2
    held = 0
    for count in happened:
        held += count
        assert held == 0 or count > 0  # each pack takes all that was read


def test_no_batch_lies_where_the_next_one_is_read(tmp_path, monkeypatch):
    """The memory of a read is used again for the next micro-batch."""
    clean = source_of(tmp_path).read(0).updates[0].micro_batches
    reuse = ReadBuffer.reuse

    def spoil(self):
        self._bytes.fill(0xEE)
        reuse(self)

    monkeypatch.setattr(ReadBuffer, "reuse", spoil)
    source = source_of(tmp_path / "again")
    spoiled = source.read(0).updates[0].micro_batches
    spoil(source._buffer)
    assert len(clean) == len(spoiled) > 2
    for one, other in zip(clean, spoiled, strict=True):
        for field in fields(TokenBatch):
            expected, found = getattr(one, field.name), getattr(other, field.name)
            same = torch.equal(expected, found) if isinstance(expected, torch.Tensor) else expected == found
            assert same, field.name


@pytest.mark.parametrize("ahead", [1, 300_000, 1 << 30])
def test_the_system_receives_a_hint_about_every_micro_batch_before_its_read(tmp_path, monkeypatch, ahead):
    """Every micro-batch is announced once, before it is read, up to the wanted distance."""
    told, sizes, read = [], [], []
    prefetch, pack = BankReader.prefetch, batches.pack

    def noted(self, wanted, parts):
        told.append([(entry.number, i) for entry, samples in wanted for i in samples])
        sizes.append(prefetch(self, wanted, parts))
        return sizes[-1]

    def noted_pack(sequences, **settings):
        read.append(len(told))
        assert len(sequences) == len(told[len(read) - 1])
        return pack(sequences, **settings)

    monkeypatch.setattr(batches, "AHEAD_BYTES", ahead)
    monkeypatch.setattr(BankReader, "prefetch", noted)
    monkeypatch.setattr(batches, "pack", noted_pack)
    (update,) = source_of(tmp_path).read(0).updates
    of_all = len(update.micro_batches)
    assert len(told) == len(read) == of_all
    names = [name for of in told for name in of]
    assert len(set(names)) == len(names)
    for number, count in enumerate(read):
        assert count > number
        assert sum(sizes[number : count - 1]) < ahead, "further than is wanted"
        assert count == of_all or sum(sizes[number:count]) >= ahead, "less far than is wanted"
    assert (1 < read[0] < of_all) == (ahead == 300_000)
