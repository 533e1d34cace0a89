"""Estimates the memory of one rank over an update, item by item."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.common.hardware import Hardware
from dppo_megatron.config import Config
from dppo_megatron.hf import HFModelConfig
from dppo_megatron.hf.export import DEFAULT_BUCKET_BYTES
from dppo_megatron.weights.broadcast_plan import BUCKET_BYTES

from .activations import FP32, Layer, MicroBatchWork, head, layer, with_recompute
from .ranks import RankModel

INT64 = 8


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the table: its name, its bytes, and the calculation."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Memory:
    """A rank's memory: the static part, and the part that each phase of a step adds while it runs.

    host: pinned memory on its node. saved: memory on the node that a checkpoint takes until it is written. Both are
    empty on a CPU, where the device's memory is the host's.
    """

    static: tuple[Item, ...]
    phases: dict[str, tuple[Item, ...]]
    host: tuple[Item, ...]
    saved: tuple[Item, ...]

    @property
    def static_bytes(self) -> int:
        return _sum(self.static)

    @property
    def tensors(self) -> int:
        """Peak bytes of tensors, which the allocator must provide."""
        return self.static_bytes + max(map(_sum, self.phases.values()))

    @property
    def largest_phase(self) -> str:
        return max(self.phases, key=lambda name: _sum(self.phases[name]))


@dataclass(frozen=True, slots=True)
class Load:
    """The largest micro-batch of a rank, all of whose tokens carry loss, and its micro-batches in an update."""

    tokens: int
    micro_batches: int


def largest_load(config: Config) -> Load:
    """Return the largest possible micro-batch: the budget, or one sequence that is longer than the budget."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if config.samples:
        longest = min(longest, config.engine.max_model_len)
    tokens = max(config.train.micro_batch_tokens, longest)
    sequences = config.rollout.prompts_per_step * config.rollout.group_size // config.train.updates_per_step
    micro_batches = max(1, -(-sequences * longest // (config.train.micro_batch_tokens * config.data_parallel)))
    return Load(-(-tokens // config.parallel.context), micro_batches)


def estimate(
    model: RankModel, hf: HFModelConfig, config: Config, hardware: Hardware, load: Load, padded_vocab: int
) -> Memory:
    """Estimate the memory of the rank `model` on `hardware` for micro-batches of the size `load`."""
    work = MicroBatchWork(hf, config, load.tokens, hardware.cuda)
    phases = {
        "forward and backward": _forward_backward(work, model, load, padded_vocab),
        "optimizer step": (*_optimizer_if_offloaded(model, config, hardware.cuda), *_step(model, config, hardware)),
        "publishing weights": _publishing(model, config, hardware),
        "saving a checkpoint": _saving(model, config, hardware),
        "loading a checkpoint": _loading(model, config, hardware),
    }
    host, saved = (_on_host(model, config), _saved(model, config)) if hardware.cuda else ((), ())
    return Memory(_static(model, hf, config, load, work), phases, host, saved)


def _static(model: RankModel, hf: HFModelConfig, config: Config, load: Load, work: MicroBatchWork) -> tuple[Item, ...]:
    e = work.e
    items = [
        Item("parameters", model.parameters * e + model.buffers * FP32, f"{model.parameters:,} x {e} bytes"),
        Item("gradients", model.trained * FP32, f"{model.trained:,} x 4 bytes (fp32)"),
    ]
    if not _optimizer_if_offloaded(model, config, work.cuda):
        items += _optimizer(model, config)
    if not work.cuda:
        items += _step_line(model, config)
    if config.model.fp8 != "none":
        items.append(Item("FP8 weights", 2 * model.parameters, "one copy and its transpose, 1 byte each"))
    if _needs_reference(config) and not config.model.lora.r:
        items.append(Item("reference policy", model.parameters * e, "a frozen copy of the start model"))
    batch = load.micro_batches * load.tokens * _per_token(model, hf, config, work)
    why = f"tokens of {load.micro_batches} micro-batches, all of an update; counters"
    items.append(Item("batch", batch + INT64 * hf.vocab_size, why))
    return tuple(items)


def _optimizer_if_offloaded(model: RankModel, config: Config, cuda: bool) -> list[Item]:
    """Return the state that `optimizer.offload` moves to a GPU for each optimizer step."""
    return _optimizer(model, config) if config.optimizer.offload and cuda else []


def _optimizer(model: RankModel, config: Config) -> list[Item]:
    sharded = config.parallel.distributed_optimizer
    states = _shard(model, sharded)
    over = f" / {model.dense_replicas} ranks" if sharded and model.dense_replicas > 1 else ""
    if over and model.expert and model.expert_replicas != model.dense_replicas:
        over += f", experts / {model.expert_replicas}"
    items = []
    if config.model.dtype != "fp32":
        items.append(Item("main parameters", states * FP32, f"{model.trained:,} x 4 bytes{over}"))
    return [*items, Item("Adam moments", states * 2 * FP32, f"{model.trained:,} x 8 bytes{over}")]


def _on_host(model: RankModel, config: Config) -> tuple[Item, ...]:
    return (*_optimizer_if_offloaded(model, config, cuda=True), *_step_line(model, config))


def _step_line(model: RankModel, config: Config) -> list[Item]:
    """Return the copies with which `acceptance` takes back a step; see `actor.StepLine`."""
    if config.acceptance.bound is None:
        return []
    size = 2 * FP32 * _shard(model, config.parallel.distributed_optimizer)
    return [Item("start and end of a step", size, "fp32 parameters, for acceptance.bound; the end once it goes back")]


def _per_token(model: RankModel, hf: HFModelConfig, config: Config, work: MicroBatchWork) -> int:
    """Return the bytes of a token of the batch on the device."""
    out = 10 * INT64 + config.rollout.topk_logprobs * 8
    if config.rollout.has_sampling_mask:  # upper bound; rollout/kept_tokens_mean is the measured mean
        out += 4 * (1 + config.rollout.top_k)
    if not work.cuda and hf.mla is None:
        out += 2 * hf.head_dim * work.e  # tables of our own rotation
    if config.rollout.routing_replay and hf.moe is not None:
        routed = sum(hf.is_moe_layer(index) for chunk in model.chunks for index in chunk)
        out += 2 * routed * hf.moe.top_k * work.kept // work.tokens
    return out


def _shard(model: RankModel, sharded: bool) -> int:
    if not sharded:
        return model.trained
    return -(-model.dense // model.dense_replicas) - (-model.expert // model.expert_replicas)


def _forward_backward(work: MicroBatchWork, model: RankModel, load: Load, padded_vocab: int) -> tuple[Item, ...]:
    in_flight = chunks_in_flight(work.config, model, load.micro_batches)
    kinds = [Counter(work.hf.is_moe_layer(index) for index in chunk) for chunk in model.chunks]
    made = {moe: layer(work, moe) for kind in kinds for moe in kind}
    kept = {moe: with_recompute(work, each) for moe, each in made.items()}
    layers: Counter[bool] = Counter()
    for kind, count in zip(kinds, in_flight, strict=True):
        for moe, number in kind.items():
            layers[moe] += number * count
    items = []
    for moe, number in layers.items():
        which = "expert" if moe else "dense"
        name = f"activations, {which} layers" if work.hf.moe else "activations"
        items.append(Item(name, number * kept[moe][0], _why(work, made[moe], number, sum(in_flight), kept[moe][0])))
    if work.config.parallel.pipeline > 1:
        count = sum(in_flight)
        items.append(Item("stage inputs and outputs", 2 * count * work.hidden_bytes, f"2 x {count} in flight"))
    working = max((each[1] for each in kept.values()), default=0)
    above = head(work, padded_vocab) if model.has_head else {}
    if sum(above.values()) >= working:
        items += [Item(f"head: {name}", size, f"{load.tokens:,} rows") for name, size in above.items()]
    else:
        items.append(Item("backward of one layer", working, "gradients in flight, and what is recomputed"))
    return tuple(items)


def _why(work: MicroBatchWork, made: Layer, number: int, in_flight: int, kept: int) -> str:
    recompute = work.config.model.recompute
    if recompute == "full":
        parts = "inputs only"
    else:
        parts = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in made.saved.items())
        if recompute == "selective" and abs(made.core) >= 2**19:
            parts += f", core attention recomputed {-made.core / 2**20:+,.0f}"
        parts += " MiB"
    return f"{number} x {kept / 2**20:,.1f} MiB a layer ({parts}); {in_flight} in flight, {work.tokens:,} tokens"


def chunks_in_flight(config: Config, model: RankModel, micro_batches: int) -> list[int]:
    """Return how many micro-batches each model chunk holds at the peak of the 1F1B or interleaved schedule."""
    p = config.parallel
    if p.virtual_pipeline is None:
        return [min(micro_batches, p.pipeline - model.stage)]
    rounds = -(-micro_batches // p.pipeline) * p.pipeline  # whole rounds: fillers make them up
    ahead = 2 * (p.pipeline - model.stage - 1) + (p.virtual_pipeline - 1) * p.pipeline + 1
    total = min(ahead, rounds * p.virtual_pipeline)
    # Chunks take turns of `pipeline` micro-batches each.
    counts = [0] * p.virtual_pipeline
    for index in range(total):
        counts[index // p.pipeline % p.virtual_pipeline] += 1
    return counts


def _step(model: RankModel, config: Config, hardware: Hardware) -> tuple[Item, ...]:
    if hardware.cuda:
        return (Item("temporaries", 0, "none: fused optimizer, NCCL reduces and gathers in place"),)
    sharded = config.parallel.distributed_optimizer
    largest = -(-model.largest_trained // (model.dense_replicas if sharded else 1))
    adam = Item("temporaries", 2 * FP32 * largest, "torch's AdamW: two tensors of the largest parameter")
    gloo = Item("temporaries", FP32 * max(model.dense, model.expert), "gloo reduces a copy of the gradients")
    return (max(adam, gloo, key=lambda item: item.bytes) if sharded else adam,)


def _publishing(model: RankModel, config: Config, hardware: Hardware) -> tuple[Item, ...]:
    if not config.samples:
        return (Item("export buckets", 0, "nothing is published"),)
    e, tensor = DTYPES[config.engine.dtype].bytes, config.parallel.tensor
    broadcast = config.weight_sync.transport == "broadcast"
    size = DEFAULT_BUCKET_BYTES
    if broadcast:
        size = config.weight_sync.bucket_bytes or BUCKET_BYTES["nccl" if hardware.cuda else "gloo"]
    # A tensor larger than a bucket has a bucket of its own.
    bucket = min(max(size, model.largest * e), model.parameters * e)
    copies = 1 + (2 * tensor if tensor > 1 else 1)  # own shards, those gathered, the whole tensors
    items = [Item("export buckets", copies * bucket, f"{copies} x {bucket >> 20} MiB: shards, gathered, whole")]
    if broadcast:
        sent = min(max(size, model.largest * e * tensor), model.parameters * e * tensor)
        items.append(Item("send buffers", 2 * sent, f"2 x {sent >> 20} MiB: one travels while the next fills"))
    return tuple(items)


def _saving(model: RankModel, config: Config, hardware: Hardware) -> tuple[Item, ...]:
    held = _optimizer_if_offloaded(model, config, hardware.cuda)
    exchange = Item("exchange of optimizer state", 0, "none: every rank holds all of it")
    if config.parallel.distributed_optimizer:
        exchange = replace(exchange, bytes=_exchange(model), why="parts of the optimizer's state, given and received")
    return (*held, exchange, *(() if hardware.cuda else _saved(model, config)))


def _saved(model: RankModel, config: Config) -> tuple[Item, ...]:
    """Return the copy that a save makes on the host. A synchronous save copies weights tensor by tensor."""
    if config.checkpoint.asynchronous:
        size = _shard(model, True) * (3 * FP32 + DTYPES[config.model.dtype].bytes)
        return (Item("checkpoint being written", size, "all that this rank saves, with checkpoint.asynchronous"),)
    return (_host_copy(model),) if config.parallel.distributed_optimizer else ()


def _loading(model: RankModel, config: Config, hardware: Hardware) -> tuple[Item, ...]:
    held = _optimizer_if_offloaded(model, config, hardware.cuda)
    sharded = config.parallel.distributed_optimizer
    merged = model.gated * DTYPES[config.model.dtype].bytes
    if sharded and not hardware.cuda:
        merged += model.gated * _shard(model, True) // model.trained * 3 * FP32
    items = [*held, Item("gate and up projections", merged, "put together from the two that are stored")]
    if sharded and _exchange(model) > merged:
        items[-1] = Item("exchange of optimizer state", _exchange(model), "larger than the projections put together")
    if sharded and not hardware.cuda:
        items.append(_host_copy(model))
    return tuple(items)


def _exchange(model: RankModel) -> int:
    """Return the bytes that a rank sends and receives at once; dense and expert optimizers take turns."""
    from dppo_megatron.actor.checkpoint.optimizer_shards import EXCHANGE_BYTES, STATE_BYTES

    kinds = ((model.dense, model.dense_replicas), (model.expert, model.expert_replicas))
    shares = [(-(-count // ranks) * STATE_BYTES, ranks) for count, ranks in kinds]
    return max(min(share, EXCHANGE_BYTES // ranks) + min(share, EXCHANGE_BYTES) for share, ranks in shares)


def _host_copy(model: RankModel) -> Item:
    return Item("optimizer state on the host", _shard(model, True) * 3 * FP32, "what this rank saves, 12 bytes each")


def _needs_reference(config: Config) -> bool:
    from dppo_megatron.objectives import build_objective

    return build_objective(config.objective.name, **config.objective.settings).needs_reference


def _sum(items: tuple[Item, ...]) -> int:
    return sum(item.bytes for item in items)
