"""Ranks that share a micro-batch compute every row once, and no padding reaches the loss."""

from dataclasses import replace

import pytest
import torch

from dppo_megatron.train.actor.batch.context import gathered_places, rows_of_rank
from dppo_megatron.train.actor.batch.packing import Packer, at_rows, filler
from dppo_megatron.train.actor.batch.segments import plan_segments
from dppo_megatron.train.actor.local.attention import PackedAttention
from tests.support.actor_cases import VOCAB, pack, sequences


def packer(**settings) -> Packer:
    return Packer(device=torch.device("cpu"), dtype=torch.float32, frequencies=None, **settings)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_own_mirrored_chunks_of_every_sequence(size):
    bounds = torch.tensor([0, 1, 4, 6]) * 2 * size
    of_ranks = [rows_of_rank(bounds, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(of_ranks).sort().values, torch.arange(12 * size))
    assert len({len(rows) for rows in of_ranks}) == 1
    assert of_ranks[0].tolist()[:2] == [0, 2 * size - 1]
    places = gathered_places(bounds, size)
    assert torch.equal(torch.cat(of_ranks)[places], torch.arange(12 * size))
    with pytest.raises(ValueError, match="context parallelism needs lengths"):
        rows_of_rank(torch.tensor([0, 2 * size + 1]), 0, size)


@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 4)])
def test_every_row_and_every_loss_token_once(context, tensor):
    batch = pack(sequences())
    parts = [packer(context_size=context, context_rank=rank, multiple=tensor)(batch) for rank in range(context)]
    assert sum(part.num_tokens for part in parts) == len(batch.token_ids)
    assert sum(part.num_loss_tokens for part in parts) == int(batch.mask.sum())
    assert len({part.token_ids.shape for part in parts}) == 1
    assert all(part.token_ids.shape[1] % tensor == 0 for part in parts)
    rows = torch.cat([part.loss_rows for part in parts])
    assert torch.equal(rows.sort().values, batch.mask.nonzero().flatten())
    for part in parts:
        assert part.loss.mask.all()
        for name in ("target_ids", "loss_weight", "rollout_logprob", "topk_ids"):
            assert torch.equal(getattr(part.loss, name), getattr(batch, name)[part.loss_rows]), name
        # The hidden states that the head is given are those of the rows it is compared with.
        assert torch.equal(part.token_ids[0, part.packed.rows], batch.token_ids[part.loss_rows])
        assert torch.equal(part.position_ids[0, part.packed.rows], batch.position_ids[part.loss_rows])


@pytest.mark.parametrize("context", [1, 2, 3])
def test_sampling_masks_follow_their_tokens(context):
    batch = pack(sequences())
    counts = torch.where(batch.mask, torch.arange(len(batch.mask)) % 4 + 1, 0).int()
    sets = [torch.arange(n).int() + row % 30 for row, n in enumerate(counts.tolist())]
    batch = replace(batch, sampling_mask_ids=torch.cat(sets), sampling_mask_counts=counts)
    for rank in range(context):
        part = packer(context_size=context, context_rank=rank, vocab_size=VOCAB)(batch)
        expected = [sets[row] for row in part.loss_rows.tolist()]
        assert part.loss.sampling_mask_counts.tolist() == [len(ids) for ids in expected]
        assert torch.equal(part.loss.sampling_mask_ids, torch.cat(expected))
    assert filler(batch).sampling_mask_ids.tolist() == sets[0].tolist()
    assert (
        at_rows(batch, torch.tensor([5, 3, 5])).sampling_mask_ids.tolist()
        == torch.cat([sets[5], sets[3], sets[5]]).tolist()
    )
    wrong = replace(batch, sampling_mask_ids=batch.sampling_mask_ids + VOCAB)
    with pytest.raises(ValueError, match="sampling_mask_ids of micro-batch 0 must be within"):
        packer(vocab_size=VOCAB)(wrong)


def test_a_rank_without_loss_tokens_still_computes_a_masked_one():
    """Its first row may be padding, as in a sequence of one token."""
    given = sequences(3)
    given[0] = {name: value[:1] for name, value in given[0].items()}
    batch = pack(given)
    first = torch.zeros_like(batch.mask)
    first[0] = True  # of_ranks by rank 0 alone
    parts = [packer(context_size=2, context_rank=rank)(replace(batch, mask=first)) for rank in range(2)]
    assert [part.num_loss_tokens for part in parts] == [1, 0]
    assert parts[1].loss_rows.tolist() == [0]
    assert not parts[1].loss.mask.any()
    assert not parts[1].loss.loss_weight.any()


def test_empty_sequences_are_refused():
    batch = pack(sequences(2))
    with pytest.raises(ValueError, match="packed sequences must not be empty"):
        packer()(replace(batch, cu_seqlens=batch.cu_seqlens[[0, 1, 1, 2]]))


@pytest.mark.parametrize(("context", "tensor", "tile"), [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 16), (2, 2, 16)])
def test_replayed_experts_follow_their_tokens(context, tensor, tile):
    batch = pack(sequences())
    layers, marks = 3, torch.arange(len(batch.token_ids), dtype=torch.int16)
    routed = marks[:, None, None] + 1000 * torch.arange(layers, dtype=torch.int16)[None, :, None].expand(-1, -1, 2)
    batch = replace(batch, routed_experts=routed.contiguous())
    seen = []
    for context_rank in range(context):
        rows = {"context_size": context, "context_rank": context_rank, "multiple": tensor * tile}
        whole = packer(**rows)(batch)
        kept = []
        for rank in range(tensor):
            part = packer(**rows, held_layers=(2, 0), sequence_rank=rank, sequence_size=tensor)(batch)
            assert part.loss.routed_experts is None
            experts = part.packed.replay.experts  # [layers held, rows, k]
            assert torch.equal(experts[0], torch.where(experts[1] >= 0, experts[1] + 2000, -1))
            assert experts.shape[1] * tensor == whole.token_ids.shape[1]
            kept.append(experts[1, :, 0])
        marks_here = torch.cat(kept)
        real = marks_here >= 0
        assert torch.equal(whole.token_ids[0, real], batch.token_ids[marks_here[real].long()])
        assert int(real.sum()) == whole.num_tokens
        seen.append(marks_here[real])
    assert torch.equal(torch.cat(seen).sort().values, marks)


def test_a_query_of_a_gathered_plan_attends_to_the_same_keys_as_on_one_rank(monkeypatch):
    """PackedAttention of every context-parallel rank, the gather faked by the test, against one rank's."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dppo_megatron.train.actor.local import attention

    size, lengths = 2, torch.tensor([40, 4, 36, 8, 100])
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, int(bounds[-1]), 2, 8, generator=generator, dtype=torch.float64)
    value = torch.randn(int(bounds[-1]), 2, 6, generator=generator, dtype=torch.float64)
    module = PackedAttention(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2), layer_number=1)

    def attend(*tensors, plan):
        from dppo_megatron.train.actor.batch.packing import PackedSequences

        return module(*tensors, None, packed_seq_params=PackedSequences(qkv_format="thd", plan=plan))

    expected = attend(query, key, value, plan=plan_segments(bounds))
    module.context_group = "of both ranks"
    of_ranks = [rows_of_rank(bounds, rank, size) for rank in range(size)]
    monkeypatch.setattr(
        attention, "gather_sequence", lambda own, group: torch.cat((key, value), -1)[torch.cat(of_ranks)]
    )
    for rank, rows in enumerate(of_ranks):
        got = attend(
            query[rows], key[rows], value[rows], plan=plan_segments(bounds, context_rank=rank, context_size=size)
        )
        torch.testing.assert_close(got, expected[rows])
