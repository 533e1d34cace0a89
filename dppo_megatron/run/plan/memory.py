"""Estimates how much memory a rank needs for an update, item by item."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.common.hardware import Hardware
from dppo_megatron.config import Config
from dppo_megatron.hf import HFModelConfig, WeightMap, read_hf_config
from dppo_megatron.hf.export import DEFAULT_BUCKET_BYTES
from dppo_megatron.objectives import build_objective
from dppo_megatron.weights.broadcast_plan import BUCKET_BYTES

from .activations import FP32, Layer, MicroBatchWork, head, layer, with_recompute
from .ranks import RankModel

INT64 = 8


@dataclass(frozen=True, slots=True)
class Item:
    """Represents a table line: a name, a number of bytes, and how they are calculated."""

    name: str
    bytes: int
    basis: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Describes a rank's static memory, and the memory that each step phase adds while it runs.

    `host` is pinned memory on the rank's node. `saved` is node memory that a checkpoint occupies until it is written.
    Both are empty on a CPU, where device memory and host memory are the same.
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
        """Return the peak tensor bytes that the allocator must provide."""
        return self.static_bytes + max(map(_sum, self.phases.values()))

    @property
    def largest_phase(self) -> str:
        return max(self.phases, key=lambda name: _sum(self.phases[name]))


@dataclass(frozen=True, slots=True)
class Load:
    """Describes a rank's largest micro-batch, with loss on all tokens, and the number of micro-batches per update."""

    tokens: int
    micro_batches: int


def largest_load(config: Config) -> Load:
    """Return the largest possible micro-batch: a full token budget, or a single sequence that exceeds the budget."""
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
    """Estimate how much memory the rank `model` needs on `hardware` for micro-batches of size `load`."""
    rank = _Rank(model, MicroBatchWork(hf, config, load.tokens, hardware.cuda), load)
    phases = {
        "forward and backward": rank.forward_backward(padded_vocab),
        "optimizer step": [*rank.offloaded, *rank.step()],
        "publishing weights": rank.publishing(),
        "saving a checkpoint": [*rank.offloaded, *rank.exchange(), *([] if hardware.cuda else rank.saved())],
        "loading a checkpoint": [*rank.offloaded, *rank.loading()],
    }
    host, saved = ([*rank.offloaded, *rank.step_line()], rank.saved()) if hardware.cuda else ([], [])
    phase_items = {name: tuple(items) for name, items in phases.items()}
    return Memory(tuple(rank.static()), phase_items, tuple(host), tuple(saved))


class _Rank:
    """Collects a rank's memory items, by phase."""

    def __init__(self, model: RankModel, work: MicroBatchWork, load: Load):
        self.model, self.work, self.load = model, work, load
        self.hf, self.config, self.cuda = work.hf, work.config, work.cuda
        self.sharded = work.config.parallel.distributed_optimizer
        self.shard = -(-model.dense // model.dense_replicas) - (-model.expert // model.expert_replicas)
        self.state = self.shard if self.sharded else model.trained  # parameters with optimizer state on this rank
        offloads = work.config.optimizer.offload and work.cuda  # a CPU rank already uses host memory
        self.offloaded = self.optimizer() if offloads else []  # these are on the GPU only during an optimizer step

    def static(self) -> list[Item]:
        model, e, load, objective = self.model, self.work.e, self.load, self.config.objective
        items = [
            Item("parameters", model.parameters * e + model.buffers * FP32, f"{model.parameters:,} x {e} bytes"),
            Item("gradients", model.trained * FP32, f"{model.trained:,} x 4 bytes (fp32)"),
            *([] if self.offloaded else self.optimizer()),
            *([] if self.cuda else self.step_line()),
        ]
        if self.config.model.fp8 != "none":
            items.append(Item("FP8 weights", 2 * model.parameters, "one copy and its transpose, 1 byte each"))
        needs_reference = build_objective(objective.name, **objective.settings).needs_reference
        if needs_reference and not self.config.model.lora.r:
            items.append(Item("reference policy", model.parameters * e, "a frozen copy of the start model"))
        if (teacher := self.config.trainer_teacher) is not None:
            shapes, p = WeightMap(read_hf_config(teacher)).hf_tensors().values(), self.config.parallel
            count = sum(map(math.prod, shapes)) // (p.tensor * p.pipeline)
            items.append(Item("teacher", count * e, f"about {count:,} x {e} bytes: a frozen model in this layout"))
        batch = load.micro_batches * load.tokens * self._bytes_per_token()
        explanation = f"tokens of {load.micro_batches} micro-batches, all of an update; counters"
        return [*items, Item("batch", batch + INT64 * self.hf.vocab_size, explanation)]

    def optimizer(self) -> list[Item]:
        model = self.model
        divisor = f" / {model.dense_replicas} ranks" if self.sharded and model.dense_replicas > 1 else ""
        if divisor and model.expert and model.expert_replicas != model.dense_replicas:
            divisor += f", experts / {model.expert_replicas}"
        items = [Item("Adam moments", self.state * 2 * FP32, f"{model.trained:,} x 8 bytes{divisor}")]
        if self.config.model.dtype != "fp32":
            items.insert(0, Item("main parameters", self.state * FP32, f"{model.trained:,} x 4 bytes{divisor}"))
        return items

    def step_line(self) -> list[Item]:
        """Return the copies that `acceptance` needs to undo a step. See `actor.StepLine`."""
        if self.config.acceptance.bound is None:
            return []
        explanation = "fp32 parameters, for acceptance.bound; the end only while a step is taken back"
        return [Item("start and end of a step", 2 * FP32 * self.state, explanation)]

    def _bytes_per_token(self) -> int:
        """Return how many device bytes a batch token takes."""
        rollout, hf = self.config.rollout, self.hf
        distillation = self.config.distillation
        out = 10 * INT64 + 8 * (rollout.topk_logprobs + (distillation.topk + 1 if distillation.teachers else 0))
        if rollout.has_sampling_mask:  # upper bound; rollout/kept_tokens_mean is the measured mean
            out += 4 * (1 + rollout.top_k)
        if not self.cuda and hf.mla is None:
            out += 2 * hf.rotary_dim * self.work.e  # tables of our rotation
        if rollout.routing_replay and hf.moe is not None:
            routed = sum(hf.is_moe_layer(index) for chunk in self.model.chunks for index in chunk)
            out += 2 * routed * hf.moe.top_k * self.work.local_tokens // self.work.tokens
        return out

    def _kind(self, index: int) -> tuple[bool, bool]:
        """Return (whether the layer has experts, whether gated delta net replaces attention)."""
        return self.hf.is_moe_layer(index), index not in self.hf.attention_layers

    def forward_backward(self, padded_vocab: int) -> list[Item]:
        work = self.work
        in_flight = chunks_in_flight(self.config, self.model, self.load.micro_batches)
        kinds = [Counter(map(self._kind, chunk)) for chunk in self.model.chunks]
        layer_estimates = {kind: layer(work, *kind) for chunk_kinds in kinds for kind in chunk_kinds}
        layer_bytes = {kind: with_recompute(work, layer_estimate) for kind, layer_estimate in layer_estimates.items()}
        layers: Counter[tuple[bool, bool]] = Counter()
        for chunk_kinds, count in zip(kinds, in_flight, strict=True):
            for kind, number in chunk_kinds.items():
                layers[kind] += number * count
        items = []
        for kind, number in layers.items():
            name = f"activations, {'expert' if kind[0] else 'dense'} layers" if self.hf.moe else "activations"
            name += ", gated delta net" * kind[1]
            explanation = _explain(work, layer_estimates[kind], number, sum(in_flight), layer_bytes[kind][0])
            items.append(Item(name, number * layer_bytes[kind][0], explanation))
        if self.config.parallel.pipeline > 1:
            count = sum(in_flight)
            items.append(Item("stage inputs and outputs", 2 * count * work.hidden_bytes, f"2 x {count} in flight"))
        working = max((pair[1] for pair in layer_bytes.values()), default=0)
        head_bytes = head(work, padded_vocab) if self.model.has_head else {}
        if sum(head_bytes.values()) >= working:
            return [
                *items,
                *(Item(f"head: {name}", size, f"{work.tokens:,} rows") for name, size in head_bytes.items()),
            ]
        return [*items, Item("backward of one layer", working, "gradients in flight and recomputed activations")]

    def step(self) -> list[Item]:
        model = self.model
        if self.cuda:
            return [Item("temporaries", 0, "none: fused optimizer, NCCL reduces and gathers in place")]
        largest = -(-model.largest_trained // (model.dense_replicas if self.sharded else 1))
        adam = Item("temporaries", 2 * FP32 * largest, "torch's AdamW: two tensors of the largest parameter")
        gloo = Item("temporaries", FP32 * max(model.dense, model.expert), "gloo reduces a copy of the gradients")
        return [max(adam, gloo, key=lambda item: item.bytes) if self.sharded else adam]

    def publishing(self) -> list[Item]:
        model, sync = self.model, self.config.weight_sync
        if not self.config.samples:
            return [Item("export buckets", 0, "nothing is published")]
        e, tensor = DTYPES[self.config.engine.dtype].bytes, self.config.parallel.tensor
        broadcast, size = sync.transport == "broadcast", DEFAULT_BUCKET_BYTES
        if broadcast:
            size = sync.bucket_bytes or BUCKET_BYTES["nccl" if self.cuda else "gloo"]
        # A tensor larger than a bucket gets a separate bucket.
        bucket = min(max(size, model.largest * e), model.parameters * e)
        copies = 1 + (2 * tensor if tensor > 1 else 1)  # local shards, gathered shards, whole tensors
        items = [Item("export buckets", copies * bucket, f"{copies} x {bucket >> 20} MiB: shards, gathered, whole")]
        if broadcast:
            sent = min(max(size, model.largest * e * tensor), model.parameters * e * tensor)
            items.append(Item("send buffers", 2 * sent, f"2 x {sent >> 20} MiB: one travels while the next fills"))
        return items

    def exchange(self) -> list[Item]:
        size, explanation = 0, "none: every rank stores the whole state"
        if self.sharded:
            size, explanation = self._exchanged(), "parts of the optimizer's state, sent and received"
        return [Item("exchange of optimizer state", size, explanation)]

    def saved(self) -> list[Item]:
        """Return the host copy that a save makes. A synchronous save copies weights tensor by tensor."""
        if self.config.checkpoint.asynchronous:
            size = self.shard * (3 * FP32 + DTYPES[self.config.model.dtype].bytes)
            return [Item("checkpoint being written", size, "all that this rank saves, with checkpoint.asynchronous")]
        return [self._host_copy()] if self.sharded else []

    def loading(self) -> list[Item]:
        on_host = self.sharded and not self.cuda
        merged = self.model.gated * DTYPES[self.config.model.dtype].bytes
        if on_host:
            merged += self.model.gated * self.shard // self.model.trained * 3 * FP32
        item = Item("gate and up projections", merged, "merged from the two stored projections")
        if self.sharded and (exchanged := self._exchanged()) > merged:
            item = Item("exchange of optimizer state", exchanged, "larger than the merged projections")
        return [item, *([self._host_copy()] if on_host else [])]

    def _exchanged(self) -> int:
        """Return how many bytes a rank sends and receives at once. Dense and expert optimizers take turns."""
        from dppo_megatron.train.actor.checkpoint.optimizer_shards import EXCHANGE_BYTES, STATE_BYTES

        model = self.model
        kinds = ((model.dense, model.dense_replicas), (model.expert, model.expert_replicas))
        shares = [(-(-count // ranks) * STATE_BYTES, ranks) for count, ranks in kinds]
        return max(min(share, EXCHANGE_BYTES // ranks) + min(share, EXCHANGE_BYTES) for share, ranks in shares)

    def _host_copy(self) -> Item:
        return Item("optimizer state on the host", self.shard * 3 * FP32, "what this rank saves, 12 bytes each")


def _explain(work: MicroBatchWork, layer_estimate: Layer, number: int, in_flight: int, saved_bytes: int) -> str:
    recompute = work.config.model.recompute
    if recompute == "full":
        parts = "inputs only"
    else:
        parts = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in layer_estimate.saved.items())
        if recompute == "selective" and abs(layer_estimate.core) >= 2**19:
            parts += f", core attention recomputed {-layer_estimate.core / 2**20:+,.0f}"
        parts += " MiB"
    return f"{number} x {saved_bytes / 2**20:,.1f} MiB a layer ({parts}); {in_flight} in flight, {work.tokens:,} tokens"


def chunks_in_flight(config: Config, model: RankModel, micro_batches: int) -> list[int]:
    """Return how many micro-batches each model chunk stores at the peak of the 1F1B or interleaved schedule.

    Example: the first of 2 stages with 2 chunks each stores [3, 2] of 4 micro-batches.
    """
    p = config.parallel
    if p.virtual_pipeline is None:
        return [min(micro_batches, p.pipeline - model.stage)]
    rounds = -(-micro_batches // p.pipeline) * p.pipeline  # filler micro-batches complete the last round
    ahead = 2 * (p.pipeline - model.stage - 1) + (p.virtual_pipeline - 1) * p.pipeline + 1
    total = min(ahead, rounds * p.virtual_pipeline)
    # Chunks take turns of `pipeline` micro-batches each.
    counts = [0] * p.virtual_pipeline
    for index in range(total):
        counts[index // p.pipeline % p.virtual_pipeline] += 1
    return counts


def _sum(items: tuple[Item, ...]) -> int:
    return sum(item.bytes for item in items)
