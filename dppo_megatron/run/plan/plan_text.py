"""Writes a plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dppo_megatron.common.hardware import CONTEXT_BYTES, GIB, MARGIN, NCCL_BYTES, peak_flops

from .activations import EXPERT_IMBALANCE
from .engines import UNUSED, EngineMemory
from .planning import Advice, LayoutPlan
from .ranks import RankModel


def report(plan: LayoutPlan, advice: Sequence[Advice]) -> str:
    """Format a plan: run totals, the busiest rank item by item, the other stages, and whether the plan fits."""
    return "\n".join([*_model(plan), "", *_rank(plan), "", *_stages(plan), *_verdict(plan, advice)])


def _model(plan: LayoutPlan) -> Iterator[str]:
    hf, config, total = plan.hf, plan.config, plan.totals
    p, cluster = config.parallel, plan.cluster
    yield f"{hf.architecture}, {total.parameters:,} parameters" + (
        f", {total.active:,} active per token" if hf.moe is not None else ""
    )
    serving = config.engine_devices
    e, placement = config.engine, ""
    if e.nodes > 1 or e.pipeline_parallel > 1:
        placement = f" over {e.nodes} nodes (tensor {e.tensor_parallel}, pipeline {e.pipeline_parallel})"
    engines = f", {e.count} engines of {e.devices}{placement}" if serving else ""
    yield (
        f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.hardware.name}: {p.world_size} trainer ranks{engines}; "
        f"tensor {p.tensor}{' + sequence' if p.sequence else ''}, pipeline {p.pipeline}"
        f"{f' x {p.virtual_pipeline}' if p.virtual_pipeline else ''}, context {p.context}, "
        f"data {config.data_parallel}"
        + (f", expert {p.expert} x tensor {p.expert_tensor or p.tensor}" if hf.moe is not None else "")
    )
    yield (
        f"an update: {total.sequences_per_update:,} sequences, at most {total.tokens_per_update:,} tokens, "
        f"{total.micro_batches_per_update} micro-batches of {config.train.micro_batch_tokens:,} on each rank"
    )
    peak = peak_flops(cluster.hardware.name, config.model.computes_in)
    yield f"model FLOPs of an update: at most {total.flops_per_update / 1e12:,.3g} TFLOP" + (
        f", {total.flops_per_update / peak / p.world_size:,.3g} s at the GPUs' peak" if peak else ""
    )
    yield from _engine(plan)
    yield f"disk: {', '.join(_disk(plan))}"
    yield from (f"note: {note}" for note in plan.notes)


def _engine(plan: LayoutPlan) -> Iterator[str]:
    engine = plan.engine
    if engine is not None:
        yield (
            f"a GPU of an engine: weights {_size(engine.weights)} of {_size(plan.cluster.hardware.memory_bytes)}, "
            f"keys and values {_size(max(0, engine.cache))}: {engine.sequences:,} sequences of "
            f"{plan.config.engine.max_model_len:,} tokens at once (assumed: {UNUSED:.0%} stay free); an update needs "
            f"{_size(engine.update)} more while it loads"
        )
    if plan.totals.published_bytes:
        size, transport = _size(plan.totals.published_bytes), plan.config.weight_sync.transport
        way = "sent to every engine" if transport == "broadcast" else "written to the disk and read by every engine"
        often = "every step"
        if (every := plan.config.weight_sync.full_every) > 1:
            often = f"one of {every} steps, only changed weights in the others"
        yield f"a publish: {size} in {often}, {way} (weight_sync.transport = {transport})"


def _disk(plan: LayoutPlan) -> Iterator[str]:
    config, total = plan.config, plan.totals
    # While a checkpoint is written, the `keep` previous ones still exist.
    yield f"checkpoints {config.checkpoint.keep + 1} x {_size(total.checkpoint_bytes)}"
    if total.published_bytes:
        if config.engine.serves_fp8:
            yield f"quantised start model {_size(total.published_bytes)}"
        if config.weight_sync.transport == "shared_storage":
            sync = config.weight_sync
            yield (
                f"published versions {sync.keep_versions + 1} x {_size(total.published_bytes)}"
                + (f" and the changed weights of up to {sync.full_every} others" if sync.full_every > 1 else "")
                + (f" in {sync.directory}" if sync.directory is not None else "")
            )
        keep = config.checkpoint.keep_rollouts
        full_size = f"{_size(total.bank_bytes)} in all {config.train.steps} steps"
        kept_size = f"{_size(total.kept_bank_bytes)} with checkpoint.keep_rollouts = {keep or 0}"
        bank_limit = f"{full_size}; {kept_size}" if keep is None else f"{kept_size}; without it {full_size}"
        for name, size in total.answer_bytes.items():
            yield f"answers of {name} at most {_size(size)} a prompt in each of {total.evaluations} evaluations"
        yield f"the bank grows by at most {_size(total.bank_bytes_per_step)} a step, to at most {bank_limit}"


def _rank(plan: LayoutPlan) -> Iterator[str]:
    model, memory = plan.stages[plan.busiest]
    yield f"rank {model.rank} ({_stage_text(model)}), {model.parameters:,} parameters:"
    rows = [(item.name, item.bytes, item.basis) for item in memory.static]
    rows.append(("always", memory.static_bytes, ""))
    for phase, items in memory.phases.items():
        rows += [(f"{phase}: {item.name}", item.bytes, item.basis) for item in items]
    rows.append((f"peak, in {memory.largest_phase}", memory.tensors, ""))
    hardware = plan.cluster.hardware
    if hardware.cuda:
        explanation = f"assumed: CUDA {CONTEXT_BYTES / GIB:.0f} GiB, NCCL {NCCL_BYTES / GIB:.0f} GiB"
        rows.append(("libraries", hardware.reserved_bytes, explanation))
    rows.append(("margin", hardware.margin_bytes, f"{MARGIN:.0%} for fragmentation"))
    rows.append(("needed", plan.cluster.need(memory), f"of {hardware.memory_bytes / GIB:.1f} GiB"))
    count = min(plan.config.parallel.world_size, plan.cluster.gpus_per_node)
    for kind, items in (("pinned, ", memory.host), ("", memory.saved)):
        for item in items:
            rows.append(
                (f"host: {item.name}", item.bytes, f"{kind}{_size(count * item.bytes)} on a node; {item.basis}")
            )
    width = max(len(name) for name, _, _ in rows)
    yield from (
        f"  {name:<{width}}  {size / GIB:>8.2f} GiB  {explanation}".rstrip() for name, size, explanation in rows
    )
    if plan.config.parallel.expert > 1:
        yield f"  assumed: the busiest rank's experts receive {EXPERT_IMBALANCE} times the mean number of tokens"


def _stage_text(model: RankModel) -> str:
    layers = ", ".join(f"{chunk[0]}-{chunk[-1]}" for chunk in model.chunks if chunk)
    ends = [name for name, present in (("embedding", model.has_embedding), ("head", model.has_head)) if present]
    return ", ".join([f"stage {model.stage}", f"layers {layers}", *ends])


def _stages(plan: LayoutPlan) -> Iterator[str]:
    if len(plan.stages) == 1:
        return
    for index, (model, memory) in enumerate(plan.stages):
        mark = "*" if index == plan.busiest else " "
        fits = "" if plan.cluster.fits(memory) else "  does not fit"
        yield f"{mark} {_stage_text(model):<40} {plan.cluster.need(memory) / GIB:>8.2f} GiB{fits}"
    yield ""


def _verdict(plan: LayoutPlan, advice: Sequence[Advice]) -> Iterator[str]:
    worst = max(plan.cluster.need(memory) for _, memory in plan.stages)
    total = plan.cluster.hardware.memory_bytes
    engine, config = plan.engine, plan.config.engine
    if engine is not None and engine.sequences and not engine.updates:
        yield _update_does_not_fit(plan, engine)
    elif engine is not None and not engine.sequences:
        quantize = "" if config.serves_fp8 else "engine.quantization = fp8_block, "
        yield (
            f"engines do not fit: weights take {_size(engine.weights)} of each of their GPUs and leave no room for one "
            f"sequence of engine.max_model_len = {config.max_model_len} tokens ({_size(engine.per_sequence)}); use "
            f"{quantize}a larger engine.tensor_parallel (more than a node's {plan.cluster.gpus_per_node} GPUs: with "
            "engine.nodes), or GPUs with more memory"
        )
    if plan.ranks_fit:
        spare = f"{(total - worst) / GIB:.1f} GiB of {total / GIB:.1f} GiB to spare"
        yield f"fits: {spare}" if plan.fits else f"trainer ranks fit: {spare}"
        return
    yield f"does not fit: {(worst - total) / GIB:.1f} GiB more than the {total / GIB:.1f} GiB of a device"
    if not advice:
        yield "no single change of the layout helps: use more devices"
        return
    first, *alternatives = advice
    yield f"change first: {first}   saves {_size(first.saves)}{_enough(first)}; costs: {first.price}"
    yield from (
        f"        else: {alternative}   saves {_size(alternative.saves)}{_enough(alternative)}"
        for alternative in alternatives
    )


def _update_does_not_fit(plan: LayoutPlan, engine: EngineMemory) -> str:
    remedies = []
    cache = engine.cache - (engine.update - engine.room)
    if cache >= engine.per_sequence:
        remedies.append(f"engine.kv_cache_bytes = {cache}")
    if plan.config.weight_sync.transport == "broadcast":
        remedies.append("weight_sync.transport = shared_storage (layers then wait in the host's memory)")
    return (
        f"engines do not fit: an update needs {_size(engine.update)} while it loads, and weights and cache leave "
        f"{_size(max(0, engine.room))}; use {', '.join([*remedies, 'a larger engine.tensor_parallel'])}"
    )


def _enough(advice: Advice) -> str:
    return ", then it fits" if advice.fits else ", but is not enough"


def _size(count: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"
