"""What a rank holds while it reads a step from the bank."""

from __future__ import annotations

from dppo_megatron.bank import BankReader
from dppo_megatron.objectives import build_objective
from dppo_megatron.trainer import batches
from dppo_megatron.trainer.batches import BankBatches
from tests.support.tiny_task import task_config

from .test_bank_batches import _long_bank


def test_a_rank_packs_what_it_read_before_it_reads_on(tmp_path, monkeypatch):
    """So it holds its share of a step as tensors, and of the bank's bytes those of one micro-batch."""
    _long_bank(tmp_path / "bank", 4, 8, layers=1)
    config = task_config(
        tmp_path,
        train={"updates_per_step": 1, "micro_batch_tokens": 1100},
        rollout={
            "prompts_per_step": 4,
            "group_size": 8,
            "max_response_tokens": 1024,
            "temperature": 1.0,
            "topk_logprobs": 20,
        },
    )
    happened = []
    read, pack = BankReader.read, batches.pack

    def noted_read(self, entry, samples, parts):
        happened.append(len(samples))
        return read(self, entry, samples, parts)

    def noted_pack(sequences, **settings):
        happened.append(-len(sequences))
        return pack(sequences, **settings)

    monkeypatch.setattr(BankReader, "read", noted_read)
    monkeypatch.setattr(batches, "pack", noted_pack)
    source = BankBatches(config, BankReader(tmp_path / "bank"), build_objective("dppo_topk_tv"), 0, 2)
    (update,) = source.read(0).updates
    assert len(update.micro_batches) > 2
    held = 0
    for count in happened:
        held += count
        assert held == 0 or count > 0  # each pack takes all that was read
