"""Loading in another layout, memory on the host, precision."""

from functools import partial
from unittest import mock

import pytest
import torch

from dppo_megatron.train.actor.offload import host_pieces
from tests.support.actor_cases import micro_batches, pack, sequences
from tests.support.actor_ranks import Rank, on_ranks, slow
from tests.train.actor.scenarios.parts import assert_resumed, fingerprint, same, topk, train


def assert_near(got: dict, expected: dict, name: str, *, loss: float = 1e-7) -> None:
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=loss), name
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), name


@on_ranks(1, slow(2))
def test_memory_on_the_host_and_back_changes_no_bit(rank: Rank):
    """Move an actor and its reference to the host and back between two updates."""
    from dppo_megatron.train.actor import Reference

    layouts: dict[str, dict] = {"plain": {"distributed_optimizer": False}, "sharded": {}}
    layouts |= {dtype: {"settings": {"dtype": dtype}} for dtype in ("bf16", "fp16")}
    if rank.world_size == 2:
        layouts["pipeline"] = {"pipeline": 2}
    for name, parallel in layouts.items():
        with rank.actor(**parallel) as actor:
            train(actor, sequences(), updates=1)
            before = fingerprint(actor)
            reference = Reference(actor)
            says = reference.scores([pack(sequences())])[0].logprob
            chunks = [*actor.model_chunks, *reference._scorer.chunks]
            with actor.offloaded() as freed:
                assert not any(p.untyped_storage().nbytes() for chunk in chunks for p in chunk.parameters()), name
            assert freed > 100_000, name  # parameters, gradients, main parameters and moments of some 15,000 elements
            assert same(before, fingerprint(actor)), name
            assert torch.equal(says, reference.scores([pack(sequences())])[0].logprob), name
            train(actor, sequences(), updates=1)
            bits = fingerprint(actor)
        with rank.actor(**parallel) as actor:
            train(actor, sequences(), updates=1)
            train(actor, sequences(), updates=1)
            assert same(bits, fingerprint(actor)), name


@on_ranks(1, slow(2))
def test_an_optimizer_on_the_host_changes_no_bit(rank: Rank):
    """Train, save and resume with and without `optimizer.offload`."""
    optimizer = {"decay": "linear", "warmup_updates": 3, "weight_decay": 0.1}
    layouts: dict[str, dict] = {dtype: {"settings": {"dtype": dtype}} for dtype in ("fp32", "bf16", "fp16")}
    layouts["plain"] = {"distributed_optimizer": False, "settings": {"dtype": "bf16"}}
    if rank.world_size == 2:
        layouts["experts"] = {"model": "qwen3_moe", "expert": 2, "settings": {"dtype": "bf16"}}
    for name, layout in layouts.items():
        with rank.actor(optimizer=optimizer, **layout) as actor:
            train(actor, sequences(), updates=3)
            train(actor, sequences(seed=1), updates=2)
            expected = fingerprint(actor)
        with rank.actor(optimizer={**optimizer, "offload": True}, **layout) as actor:
            train(actor, sequences(), updates=3)
            with actor.offloaded():
                pass
            assert sum(state_bytes(actor).values()) == 0, name
            with actor.optimizer_on_device():
                assert sum(state_bytes(actor).values()) > 100_000, name
            actor.save_checkpoint(rank.directory / name, 3, {}, keep=1)
        with rank.actor(optimizer={**optimizer, "offload": True}, **layout) as actor:
            actor.load_checkpoint(rank.directory / name)
            train(actor, sequences(seed=1), updates=2)
            with actor.optimizer_on_device():
                assert same(expected, fingerprint(actor)), name


def state_bytes(actor) -> dict[int, int]:
    """Bytes of each storage of the optimizer that is not the model's."""
    model = {p.untyped_storage()._cdata for chunk in actor.model_chunks for p in chunk.parameters()}
    storages = [
        value.untyped_storage()
        for part in actor.optimizer.chained_optimizers
        for parameter, state in part.optimizer.state.items()
        for value in (parameter, *state.values())
        if isinstance(value, torch.Tensor)
    ]
    return {s._cdata: s.nbytes() for s in storages if s._cdata not in model}


@on_ranks(1)
def test_bf16_keeps_gradients_and_optimizer_in_fp32(rank: Rank):
    with rank.actor(settings={"dtype": "bf16"}) as actor:
        train(actor, sequences(), updates=1)
        parameters = [p for chunk in actor.model_chunks for p in chunk.parameters()]
        inner = actor.optimizer.chained_optimizers[0].optimizer
        states = [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        assert {p.dtype for p in parameters} == {torch.bfloat16}
        assert {p.main_grad.dtype for p in parameters} == {torch.float32}
        assert {p.dtype for group in inner.param_groups for p in group["params"]} == {torch.float32}
        assert {v.dtype for v in states} == {torch.float32}
        log = actor.describe()
    assert any("bf16 parameters and activations, fp32 gradients and optimizer" in line for line in log)
    assert any("layers local, Adam torch" in line for line in log)


@on_ranks(1, 2)
def test_an_fp32_head_is_exact_to_fp32(rank: Rank):
    """The head of a bf16 model, multiplied in bf16 and in fp32."""
    parallel = {} if rank.world_size == 1 else {"tensor": 2}
    for model in ("qwen3", "tied"):
        errors, updates, dtypes = [], [], []
        for exact in (False, True):
            with rank.actor(model, settings={"dtype": "bf16", "fp32_head": exact}, **parallel) as actor:
                seen: dict[str, torch.Tensor] = {}

                def keep(module, inputs, output, seen=seen):
                    seen.update(rows=inputs[0].detach().clone(), logits=output[0].detach().clone())

                policy = actor.model_chunks[0]
                hook = policy.output_layer.register_forward_hook(keep)
                actor.logprobs([pack(sequences())])
                hook.remove()
                wanted = seen["rows"].double() @ policy.head_weight.detach().double().T
                errors.append(float((seen["logits"].double() - wanted).abs().max()))
                dtypes.append(seen["logits"].dtype)
                updates.append(actor.train_update(micro_batches(sequences(), 2), topk()))
        assert dtypes == [torch.bfloat16, torch.float32]
        assert errors[1] < 1e-5 < errors[0]
        plain, wide = updates
        assert wide.loss == pytest.approx(plain.loss, rel=0.05, abs=0.01)
        assert wide.grad_norm == pytest.approx(plain.grad_norm, rel=0.05)


@on_ranks(1, slow(2))
def test_a_batch_invariant_head_gives_a_row_the_same_bits_in_every_micro_batch(rank: Rank):
    """Compare log-probs of a micro-batch with those of its single sequences, and an update with the default head."""
    parts, differed = sequences(), []
    # One loss row each: a library has kernels of its own for products of a row.
    short = [{name: value[:2] for name, value in p.items()} | {"mask": torch.tensor([True, False])} for p in parts]
    for logits, settings in (
        ("stored", {}),
        ("stored", {"dtype": "bf16", "fp32_head": True}),
        ("fused", {"dtype": "bf16"}),
    ):
        coarse = "dtype" in settings
        for model, parallel in (("wider", {}), ("tied", {"sequence": True})):
            parallel = {} if rank.world_size == 1 else {"tensor": 2, **parallel}
            updates, differing = [], []
            for invariant in (False, True):
                asked = {"logits": logits, **settings, "batch_invariant_head": invariant}
                with rank.actor(model, settings=asked, **parallel) as actor:
                    if not parallel.get("sequence"):  # a rank has all hidden states
                        differing.append(_rows_that_differ(actor, short))
                    updates.append(actor.train_update(micro_batches(parts, 2), topk()))
            plain, got = updates
            rel, floor = (0.01, 1e-3) if coarse else (1e-5, 1e-6)
            assert got.loss == pytest.approx(plain.loss, rel=rel, abs=floor), (asked, model)
            assert got.grad_norm == pytest.approx(plain.grad_norm, rel=2 * rel if coarse else rel), (asked, model)
            assert not any(differing[1:]), (asked, model)
            differed += differing[:1]
    assert any(differed)  # What the setting is for.


def _rows_that_differ(actor, parts: list[dict[str, torch.Tensor]]) -> int:
    decoder, given = actor.model_chunks[0].decoder, []
    hook = decoder.register_forward_hook(lambda module, inputs, output: given.append(output.detach().clone()))
    (together,) = actor.logprobs([pack(parts)])
    hook.remove()
    count = 0
    for number, part in enumerate(parts):
        start, end = 2 * number, 2 * number + 2

        def put(module, inputs, output, hidden=given[0][start:end]):
            return torch.cat((hidden, output[len(hidden) :]))

        hook = decoder.register_forward_hook(put)
        (alone,) = actor.logprobs([pack([part])])
        hook.remove()
        count += int((alone[:2] != together[start:end]).sum())
    return count


def buckets_of(size: int | None):
    """Patch the size of the buckets of Megatron's gradient buffers."""
    from dppo_megatron.train.actor import optimizer

    settings = partial(optimizer.DistributedDataParallelConfig, bucket_size=size)
    return mock.patch.object(optimizer, "DistributedDataParallelConfig", settings)


@pytest.mark.slow
@on_ranks(2)
def test_every_rank_saves_its_share_of_buffers_with_many_buckets(rank: Rank):
    """Buffers split into buckets with padding between them: saved, and continued in the same layout and in another.

    Exchanged in many small parts.
    """
    from dppo_megatron.train.actor.checkpoint import optimizer_shards

    optimizer = {"weight_decay": 0.1}
    for model, layout in (("qwen3", {"tensor": 2}), ("qwen3_moe", {"pipeline": 2})):
        directory = rank.directory / model
        with mock.patch.object(optimizer_shards, "EXCHANGE_BYTES", 5000), buckets_of(5000):
            with rank.actor(model, optimizer=optimizer, overlap=True) as actor:
                assert sum(len(buffer.buckets) for chunk in actor.model for buffer in chunk.buffers) > 5, model
                train(actor, sequences())
                actor.save_checkpoint(directory, 3, {"step": 3}, keep=1)
                expected = train(actor, sequences(seed=1), updates=2)
                bits = fingerprint(actor)
            with rank.actor(model, optimizer=optimizer, overlap=True) as actor:
                actor.load_checkpoint(directory)
                train(actor, sequences(seed=1), updates=2)
                assert same(bits, fingerprint(actor)), model
            with rank.actor(model, optimizer=optimizer, **layout) as actor:
                actor.load_checkpoint(directory)
                assert_near(train(actor, sequences(seed=1), updates=2), expected, model, loss=1e-6)
        written = [0] * rank.world_size
        for file in (directory / "step-000003").glob("__*.distcp"):
            written[int(file.name.split("_")[2])] += file.stat().st_size
        assert min(written) > 0.4 * sum(written), model


@on_ranks(1)
def test_megatron_still_saves_buckets_with_padding_wrongly(rank: Rank):
    """Megatron's `fully_reshardable` save writes other parameters than ours.

    When this fails, the installed Megatron has mended it: see the head of `checkpoint/optimizer_shards.py`.
    """
    from dppo_megatron.train.actor.checkpoint.save_load import _sharded_state

    for bucket_size, wrong in ((None, False), (5000, True)):
        with buckets_of(bucket_size), rank.actor("qwen3", overlap=True) as actor:
            train(actor, sequences())
            state = _sharded_state(actor, loading=False)
            (part,) = actor.optimizer.chained_optimizers
            theirs = part.sharded_param_state_fully_reshardable(state["model0"], False, {})
        differing = sum(
            any(not torch.equal(ours[key].data, theirs[number][key].data) for key in ours)
            for number, ours in state["optimizer"]["param_state"].items()
        )
        assert (differing > 0) == wrong, bucket_size


@pytest.mark.slow
@on_ranks(2)
def test_saved_in_one_layout_and_continued_in_another(rank: Rank):
    """In the last, the first rank has no experts."""
    layouts = {
        "tensor_to_pipeline": ("qwen3", {"tensor": 2}, {"pipeline": 2}),
        "gathered": ("qwen3_moe", {"expert": 2}, {}),
        "spread": ("qwen3_moe", {}, {"expert": 2}),
        "behind_a_dense_stage": ("deepseek", {"expert": 2}, {"pipeline": 2, "first_stage_layers": 1}),
    }
    for name, (model, first, second) in layouts.items():
        with rank.actor(model, **first) as actor:
            train(actor, sequences())
            actor.save_checkpoint(rank.directory / name, 3, {"step": 3}, keep=1)
            expected = train(actor, sequences(seed=1), updates=2)
        with rank.actor(model, **second) as actor:
            actor.load_checkpoint(rank.directory / name)
            assert_near(train(actor, sequences(seed=1), updates=2), expected, name)


@pytest.mark.parallel
@on_ranks(4)
def test_experts_behind_a_stage_without_them(rank: Rank):
    """A stage without experts comes before one with experts over two ranks."""
    layout = {"model": "deepseek", "pipeline": 2, "first_stage_layers": 1, "expert": 2}
    assert_resumed(rank, "experts", layout)


@pytest.mark.parametrize("nbytes", [1, 4096, (1 << 20) - 1, 1 << 20, 33_000_000_123, (1 << 35) + 5])
def test_pinned_memory_that_is_rounded_up_is_hardly_more(nbytes):
    sizes = host_pieces(nbytes)
    assert sum(sizes) == nbytes
    assert sum(1 << (size - 1).bit_length() for size in sizes) - nbytes < 1 << 20
