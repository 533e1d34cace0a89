"""Checkpoints written behind training, memory on the host, precision. Every function runs on all ranks."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import torch

from tests.actor.scenarios.parts import everywhere, fingerprint, resumed, same, topk, train
from tests.support.actor_cases import micro_batches, pack, sequences
from tests.support.actor_ranks import Rank

LIMIT_S = 4  # of a collective, and of a disk that takes nothing
ASYNCHRONOUS = {"checkpoint": {"asynchronous": True, "timeout_s": 30}}


class Gate:
    """Blocks every write of a checkpoint until it is opened."""

    def __enter__(self) -> threading.Event:
        from dppo_megatron.actor.checkpoint.writer import HostFiles

        opened, self._write = threading.Event(), HostFiles.write

        def write(files, moved):
            assert opened.wait(30)
            self._write(files, moved)

        HostFiles.write = write
        return opened

    def __exit__(self, *error: object) -> None:
        from dppo_megatron.actor.checkpoint.writer import HostFiles

        HostFiles.write = self._write


def asynchronous(rank: Rank) -> Any:
    """Train while a checkpoint is written; it must contain the state at the time of the save."""
    directory = rank.directory / "checkpoints"
    latest = directory / "latest"
    parallel = {} if rank.world_size == 1 else {"tensor": 2}
    with rank.actor(sections=ASYNCHRONOUS, **parallel) as actor:
        train(actor, sequences(), updates=1)
        actor.save_checkpoint(directory, 1, {"step": 1}, keep=1)
        actor.finish_checkpoint()
        with Gate() as opened:
            train(actor, sequences(), updates=1)
            bits = fingerprint(actor)
            actor.save_checkpoint(directory, 2, {"step": 2}, keep=1)
            train(actor, sequences(), updates=1)
            while_writing = (latest.read_text(), not same(bits, fingerprint(actor)))
            opened.set()
            actor.finish_checkpoint()
        after = (latest.read_text(), sorted(p.name for p in directory.iterdir()))
    with rank.actor(**parallel) as actor:
        state = actor.load_checkpoint(directory)
        equal = everywhere(same(bits, fingerprint(actor)))
    return {"while_writing": while_writing, "after": after, "state": state, "equal": equal}


def failing_write(rank: Rank) -> Any:
    """A rank that cannot write: the next save raises on every rank, and the last good checkpoint stays."""
    from dppo_megatron.actor import CheckpointError
    from dppo_megatron.actor.checkpoint.writer import HostFiles

    directory = rank.directory / "checkpoints"
    original = HostFiles.write
    with rank.actor(sections=ASYNCHRONOUS) as actor:
        actor.save_checkpoint(directory, 1, {"step": 1}, keep=1)
        actor.finish_checkpoint()
        if rank.rank == rank.world_size - 1:
            HostFiles.write = full
        actor.save_checkpoint(directory, 2, {"step": 2}, keep=1)
        try:
            actor.save_checkpoint(directory, 3, {"step": 3}, keep=1)
            error = None
        except CheckpointError as raised:
            error = str(raised)
        finally:
            HostFiles.write = original
        state = actor.load_checkpoint(directory)
    return {"error": error, "state": state}


def full(files, moved) -> None:
    raise OSError(28, "No space left on device")


def offloaded(rank: Rank) -> Any:
    """Move an actor and its reference to the host and back between two updates."""
    from dppo_megatron.actor import Reference

    results = {}
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
                held = sum(p.untyped_storage().nbytes() for chunk in chunks for p in chunk.parameters())
            restored = same(before, fingerprint(actor))
            restored = restored and torch.equal(says, reference.scores([pack(sequences())])[0].logprob)
            train(actor, sequences(), updates=1)
            bits = fingerprint(actor)
        with rank.actor(**parallel) as actor:
            train(actor, sequences(), updates=1)
            train(actor, sequences(), updates=1)
            equal = same(bits, fingerprint(actor))
            results[name] = (held, freed, everywhere(restored), everywhere(equal))
    return results


def optimizer_on_host(rank: Rank) -> Any:
    """Train, save and resume with and without `optimizer.offload`."""
    optimizer = {"decay": "linear", "warmup_updates": 3, "weight_decay": 0.1}
    layouts: dict[str, dict] = {dtype: {"settings": {"dtype": dtype}} for dtype in ("fp32", "bf16", "fp16")}
    layouts["plain"] = {"distributed_optimizer": False, "settings": {"dtype": "bf16"}}
    if rank.world_size == 2:
        layouts["experts"] = {"model": "qwen3_moe", "expert": 2, "settings": {"dtype": "bf16"}}
    results = {}
    for name, layout in layouts.items():
        with rank.actor(optimizer=optimizer, **layout) as actor:
            train(actor, sequences(), updates=3)
            train(actor, sequences(seed=1), updates=2)
            expected = fingerprint(actor)
        with rank.actor(optimizer={**optimizer, "offload": True}, **layout) as actor:
            train(actor, sequences(), updates=3)
            with actor.offloaded():
                pass
            held = sum(state_bytes(actor).values())
            with actor.optimizer_on_device():
                size = sum(state_bytes(actor).values())
            actor.save_checkpoint(rank.directory / name, 3, {}, keep=1)
        with rank.actor(optimizer={**optimizer, "offload": True}, **layout) as actor:
            actor.load_checkpoint(rank.directory / name)
            train(actor, sequences(seed=1), updates=2)
            with actor.optimizer_on_device():
                results[name] = (held, size, everywhere(same(expected, fingerprint(actor))))
    return results


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


def dtypes(rank: Rank) -> Any:
    """Return the dtypes of bf16 training."""
    with rank.actor(settings={"dtype": "bf16"}) as actor:
        train(actor, sequences(), updates=1)
        parameters = [p for chunk in actor.model_chunks for p in chunk.parameters()]
        inner = actor.optimizer.chained_optimizers[0].optimizer
        states = [v for state in inner.state.values() for v in state.values()]
        return {
            "parameters": {p.dtype for p in parameters},
            "gradients": {p.main_grad.dtype for p in parameters},
            "main": {p.dtype for group in inner.param_groups for p in group["params"]},
            "states": {v.dtype for v in states if isinstance(v, torch.Tensor)},
            "log": actor.describe(),
        }


def fp32_head(rank: Rank) -> Any:
    """The head of a bf16 model, multiplied in bf16 and in fp32."""
    results = {}
    parallel = {} if rank.world_size == 1 else {"tensor": 2}
    for model in ("qwen3", "tied"):
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
                error = float((seen["logits"].double() - wanted).abs().max())
                stats = actor.train_update(micro_batches(sequences(), 2), topk())
                results[model, exact] = (str(seen["logits"].dtype), error, stats.loss, stats.grad_norm)
    return results


def batch_invariant_head(rank: Rank) -> Any:
    """Log-probs of one micro-batch and of its sequences alone, from the same hidden states; and an update's numbers.

    (logits, model settings, setting) -> (rows whose bits differ, loss, gradient norm).
    """
    parts = sequences()
    # One loss row each: a library has kernels of its own for products of a row.
    short = [{name: value[:2] for name, value in p.items()} | {"mask": torch.tensor([True, False])} for p in parts]
    results = {}
    for logits, settings in (
        ("stored", {}),
        ("stored", {"dtype": "bf16", "fp32_head": True}),
        ("fused", {}),
        ("fused", {"dtype": "bf16"}),
    ):
        for model, parallel in (("wider", {}), ("tied", {"sequence": True})):
            parallel = {} if rank.world_size == 1 else {"tensor": 2, **parallel}
            for invariant in (False, True):
                asked = {"logits": logits, **settings, "batch_invariant_head": invariant}
                with rank.actor(model, settings=asked, **parallel) as actor:
                    differing = None
                    if not parallel.get("sequence"):  # a rank has all hidden states
                        differing = _rows_that_differ(actor, short)
                    stats = actor.train_update(micro_batches(parts, 2), topk())
                results[logits, model, str(settings), invariant] = (differing, stats.loss, stats.grad_norm)
    return results


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


def many_buckets(rank: Rank) -> Any:
    """Buffers split into buckets with padding between them: saved, and continued in the same layout and in another.

    Exchanged in many small parts. And how many bytes of the checkpoint each rank wrote.
    """
    from dppo_megatron.actor import optimizer as module
    from dppo_megatron.actor.checkpoint import optimizer_shards

    at_once = optimizer_shards.EXCHANGE_BYTES
    optimizer_shards.EXCHANGE_BYTES = 5000

    directory = rank.directory / "checkpoints"
    settings = module.DistributedDataParallelConfig
    module.DistributedDataParallelConfig = partial(settings, bucket_size=5000)
    results = {}
    try:
        for model, layout in (("qwen3", {"tensor": 2}), ("qwen3_moe", {"pipeline": 2})):
            optimizer = {"weight_decay": 0.1}
            with rank.actor(model, optimizer=optimizer, overlap=True) as actor:
                buckets = sum(len(buffer.buckets) for chunk in actor.model for buffer in chunk.buffers)
                train(actor, sequences())
                actor.save_checkpoint(directory / model, 3, {"step": 3}, keep=1)
                expected = train(actor, sequences(seed=1), updates=2)
                bits = fingerprint(actor)
            with rank.actor(model, optimizer=optimizer, overlap=True) as actor:
                actor.load_checkpoint(directory / model)
                train(actor, sequences(seed=1), updates=2)
                equal = everywhere(same(bits, fingerprint(actor)))
            with rank.actor(model, optimizer=optimizer, **layout) as actor:
                actor.load_checkpoint(directory / model)
                got = train(actor, sequences(seed=1), updates=2)
            sizes = [0] * rank.world_size
            for file in (directory / model / "step-000003").glob("__*.distcp"):
                sizes[int(file.name.split("_")[2])] += file.stat().st_size
            results[model] = {"buckets": buckets, "equal": equal, "elsewhere": (expected, got), "written": sizes}
    finally:
        optimizer_shards.EXCHANGE_BYTES = at_once
        module.DistributedDataParallelConfig = settings
    return results


def megatrons_own_shards(rank: Rank) -> Any:
    """How many of rank 0's parameters Megatron's `fully_reshardable` save would write differently from ours."""
    from dppo_megatron.actor import optimizer as module
    from dppo_megatron.actor.checkpoint.save_load import _sharded_state

    differing = {}
    settings = module.DistributedDataParallelConfig
    try:
        for name, bucket_size in (("one bucket", None), ("many buckets", 5000)):
            module.DistributedDataParallelConfig = partial(settings, bucket_size=bucket_size)
            with rank.actor("qwen3", overlap=True) as actor:
                train(actor, sequences())
                state = _sharded_state(actor, loading=False)
                (part,) = actor.optimizer.chained_optimizers
                theirs = part.sharded_param_state_fully_reshardable(state["model0"], False, {})
                differing[name] = sum(
                    any(not torch.equal(ours[key].data, theirs[number][key].data) for key in ours)
                    for number, ours in state["optimizer"]["param_state"].items()
                )
    finally:
        module.DistributedDataParallelConfig = settings
    return differing


def saved_elsewhere(rank: Rank) -> Any:
    """Losses after saving in one layout and continuing in another. In the last, the first rank has no experts."""
    results = {}
    layouts = {
        "tensor to pipeline": ("qwen3", {"tensor": 2}, {"pipeline": 2}),
        "gathered": ("qwen3_moe", {"expert": 2}, {}),
        "spread": ("qwen3_moe", {}, {"expert": 2}),
        "behind a dense stage": ("deepseek", {"expert": 2}, {"pipeline": 2, "first_stage_layers": 1}),
    }
    for name, (model, first, second) in layouts.items():
        directory = rank.directory / name.replace(" ", "_")
        with rank.actor(model, **first) as actor:
            train(actor, sequences())
            actor.save_checkpoint(directory, 3, {"step": 3}, keep=1)
            expected = train(actor, sequences(seed=1), updates=2)
        with rank.actor(model, **second) as actor:
            actor.load_checkpoint(directory)
            results[name] = (expected, train(actor, sequences(seed=1), updates=2))
    return results


def dense_stage_then_experts(rank: Rank) -> Any:
    """Four ranks: a stage without experts comes before one with experts over two ranks."""
    layout = {"model": "deepseek", "pipeline": 2, "first_stage_layers": 1, "expert": 2}
    return resumed(rank, "experts", layout)


def slow_disk(rank: Rank) -> Any:
    """A disk that takes several times as long as a collective may: an export and checkpoints of both kinds."""
    from dppo_megatron.common import files
    from dppo_megatron.hf import save_hf

    sync, at_once = files.SteadyFile.sync, files.FLUSH_BYTES
    waits = {"export": 0.3, "save": 0.1, "asynchronous": 0.1}  # for each part of a file
    took, loaded = {}, {}
    for kind, pause in waits.items():

        def slowly(file, pause=pause if kind == "export" else pause * rank.rank):
            time.sleep(pause)
            sync(file)

        sections = {"checkpoint": {"asynchronous": kind == "asynchronous", "timeout_s": LIMIT_S}}
        with rank.actor(tensor=2, timeout_s=LIMIT_S, sections=sections) as actor:
            train(actor, sequences(), updates=1)
            files.SteadyFile.sync, files.FLUSH_BYTES = slowly, 4096
            started = time.monotonic()
            try:
                if kind == "export":
                    save_hf(actor.model_chunks, rank.directory / "hf", actor.config.model.path, shard_bytes=16 << 10)
                else:
                    actor.save_checkpoint(rank.directory / kind, 1, {"step": 1}, keep=1)
                    actor.finish_checkpoint()
            finally:
                files.SteadyFile.sync, files.FLUSH_BYTES = sync, at_once
            took[kind] = time.monotonic() - started
            bits = fingerprint(actor)
            if kind == "export":
                actor.load_hf(rank.directory / "hf")
            else:
                actor.load_checkpoint(rank.directory / kind)
            loaded[kind] = everywhere(same(bits, fingerprint(actor)))
    return {"took": took, "loaded": loaded}
