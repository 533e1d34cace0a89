"""Computes how much memory each layer part keeps between a micro-batch's forward and backward pass.

docs/plan.md has these formulas as a table. t is the number of micro-batch tokens on this rank, s the number that a
sequence-parallel rank stores (t / tensor), and e the bytes per element. Sizes are per tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config import Config
from dppo_megatron.hf import DeltaNetConfig, HFModelConfig, MLAConfig, MoEConfig
from dppo_megatron.train.actor.batch.chunks import CHUNK
from dppo_megatron.vocab_parallel.linear import column_blocks

FP32 = 4
INDEX = 8
EXPERT_IMBALANCE = 1.2  # assumed: tokens on the busiest expert-parallel rank / mean; depends on routing


@dataclass(frozen=True, slots=True)
class MicroBatchWork:
    """Describes a micro-batch. `tokens` counts tokens on this context-parallel rank. With `cuda`, kernels are fused."""

    hf: HFModelConfig
    config: Config
    tokens: int
    cuda: bool

    @property
    def e(self) -> int:
        return DTYPES[self.config.model.dtype].bytes

    @property
    def tensor(self) -> int:
        return self.config.parallel.tensor

    @property
    def expert_tensor(self) -> int:
        return self.config.parallel.expert_tensor or self.tensor

    @property
    def local_tokens(self) -> int:
        return -(-self.tokens // self.tensor) if self.config.parallel.sequence else self.tokens

    @property
    def weight_gradient(self) -> int:
        """Return the bytes per gradient element before it is added to the fp32 buffer, or 0 without a gradient."""
        if self.config.model.lora.r:
            return 0
        widened = FP32 if self.e < FP32 and not self.cuda else 0  # the CPU adds in one dtype only
        return self.e + widened

    @property
    def local(self) -> int:
        """Return the context-parallel size if `actor.PackedAttention` gathers keys on a GPU, else 0."""
        local_layers = self.config.model.layers == "local" or self.config.model.lora.r > 0
        return self.config.parallel.context if self.cuda and local_layers else 0

    @property
    def hidden_bytes(self) -> int:
        """Return how many bytes a layer output [s, H] takes."""
        return self.e * self.local_tokens * self.hf.hidden_size


@dataclass(frozen=True, slots=True)
class Layer:
    """Counts a layer's bytes. `saved` is kept until the backward pass, and `working` is added while that pass runs.

    `core` is the part that selective recompute frees. It is small because no attention scores are counted.
    """

    saved: dict[str, int]
    working: int
    core: int

    @property
    def total(self) -> int:
        return sum(self.saved.values())


def layer(work: MicroBatchWork, moe: bool, delta_net: bool = False) -> Layer:
    """Return how many bytes a transformer layer takes without recompute."""
    hf = work.hf
    if delta_net and hf.delta_net is not None:
        saved, core = {"norms": 2 * _norm(work), "gated delta net": _delta_net(work, hf.delta_net)}, 0
    else:
        attention, core = _grouped(work) if hf.mla is None else _latent(work, hf.mla)
        saved = {"norms": 2 * _norm(work), "attention": attention}
    if moe and hf.moe is not None:
        experts, working = _experts(work, hf.moe)
        saved |= experts
    else:
        saved["feed-forward"], working = _swiglu(work, hf.ffn_hidden_size // work.tensor, work.tokens)
    q, kv = (n // work.tensor * hf.head_dim for n in (hf.num_heads, hf.num_kv_heads))
    # FlashAttention runs two backward passes. They need the rows that continue others, the gradients of these rows, and
    # a key gradient per query head.
    attending = bool(work.local) * work.e * work.tokens * (8 * q + 4 * kv * (1 + work.local))
    return Layer(saved, max(working, attending), core)


def _norm(work: MicroBatchWork) -> int:
    """Return how many bytes a norm saves: the input, and the output for the next matrix product."""
    elements = work.local_tokens * work.hf.hidden_size
    saved = work.e if work.cuda else FP32  # our norm on the CPU saves the normalized rows in fp32
    return elements * (saved + work.e)


def _grouped(work: MicroBatchWork) -> tuple[int, int]:
    """Return the bytes that grouped-query attention saves: (all, only core attention)."""
    hf, t, e = work.hf, work.tokens, work.e
    heads, groups = hf.num_heads // work.tensor, max(1, hf.num_kv_heads // work.tensor)
    q, kv = t * heads * hf.head_dim, t * groups * hf.head_dim
    log_sums = FP32 * t * heads
    if work.cuda:
        # Saved are the projection output (values are a view of it), rotated queries and keys, and the attention output.
        # fp32 adds padded queries and outputs, and a key and a value for each query head.
        core = log_sums + e * (2 * kv * work.local * (work.local > 1) + 4 * q * (e == FP32))
        return e * (q + 2 * kv) + e * (q + kv) + e * q + core, core
    norms = FP32 * (q + kv) if hf.qk_norm else 0
    padded = e * (q + 2 * kv)  # SDPA's inputs; if core attention is recomputed, the whole projection is kept too
    core = e * q + log_sums - e * (q + kv)
    return norms + padded + 2 * e * q + log_sums, core


def _latent(work: MicroBatchWork, mla: MLAConfig) -> tuple[int, int]:
    """Return the bytes that multi-head latent attention saves: (all, only core attention)."""
    t, e, heads = work.tokens, work.e, work.hf.num_heads // work.tensor
    query = t * heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value = t * heads * mla.v_head_dim
    up = t * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    compressed = work.local_tokens * ((mla.q_lora_rank or 0) + mla.kv_lora_rank)
    norms = compressed * ((e if work.cuda else FP32) + e)
    log_sums = FP32 * t * heads
    unfused = 0 if work.cuda else e * (2 * query + 2 * value)  # padded for SDPA
    if work.local:  # FlashAttention's values and outputs are as wide as queries
        unfused = 2 * e * (query - value + query * work.local * (work.local > 1))
    return norms + e * (2 * query + up + value) + log_sums + unfused, log_sums


def _delta_net(work: MicroBatchWork, sizes: DeltaNetConfig) -> int:
    """Return the bytes that gated delta net saves. It computes in fp32; the factors are fitted to saved tensors."""
    groups, heads = (n // work.tensor for n in (sizes.num_key_heads, sizes.num_value_heads))
    key, value = sizes.key_head_dim, sizes.value_head_dim
    head_elements = 5 * key + 13 * value + 6 * CHUNK + key * value // CHUNK
    return FP32 * work.tokens * (14 * groups * key + heads * head_elements)


def _swiglu(work: MicroBatchWork, width: int, rows: int) -> tuple[int, int]:
    """Return the bytes that a feed-forward takes: (saved after the first matrix product, used in the backward pass)."""
    e, hidden = work.e, work.hf.hidden_size
    copies = 3 if work.cuda else 5  # gate, up and their product; unfused also silu(gate) and a copy of up
    weight_gradient = work.weight_gradient * 2 * width * hidden
    return e * rows * copies * width, e * rows * 3 * width + weight_gradient


def _experts(work: MicroBatchWork, moe: MoEConfig) -> tuple[dict[str, int], int]:
    """Return the bytes that router, dispatch and experts take: (saved by part, used in the backward pass)."""
    hf, e, local_tokens = work.hf, work.e, work.local_tokens
    received = local_tokens * moe.top_k * work.expert_tensor
    if work.config.parallel.expert > 1:
        received = int(received * EXPERT_IMBALANCE)
    dispatched = e * received * hf.hidden_size
    routed, working = _swiglu(work, moe.ffn_hidden_size // work.expert_tensor, received)
    saved = {
        "router": local_tokens * moe.num_experts * 3 * FP32 + local_tokens * moe.top_k * 3 * INDEX,
        "dispatched tokens": dispatched,
        "experts": routed,
    }
    local_experts = moe.num_experts // work.config.parallel.expert
    if work.config.model.lora.r and local_experts > 1:  # A and B of the gate, up and down projections
        sizes = 3 * hf.hidden_size + 5 * moe.ffn_hidden_size // work.expert_tensor
        saved["stacked adapters"] = e * local_experts * work.config.model.lora.r * sizes
    if moe.shared_ffn_hidden_size:
        saved["shared experts"] = _swiglu(work, moe.shared_ffn_hidden_size // work.tensor, work.tokens)[0]
    return saved, working + 2 * dispatched


def with_recompute(work: MicroBatchWork, layer: Layer) -> tuple[int, int]:
    """Return a layer's (saved, working) bytes under `model.recompute`."""
    return {
        "none": (layer.total, layer.working),
        "selective": (layer.total - layer.core, layer.working + layer.core),
        "full": (work.hidden_bytes, layer.total + layer.working),
    }[work.config.model.recompute]


def head(work: MicroBatchWork, padded_vocab: int) -> dict[str, int]:
    """Return the bytes that head and loss need in their backward pass, besides the layers, if every token has loss."""
    hf, e, rows, model = work.hf, work.e, work.tokens, work.config.model
    columns, hidden, fused = padded_vocab // work.tensor, rows * hf.hidden_size, model.logits == "fused"
    block = max(block.stop - block.start for block in column_blocks(columns)) if fused else columns
    gathered = e * hidden if work.config.parallel.sequence else 0
    out = {
        "head input": _norm(work) + gathered + e * hidden,  # final norm, gather, the selected rows
        "a block of logits" if fused else "logits": e * rows * block,
        "hidden gradient": (FP32 + e if fused else e) * hidden,
        "weight gradient": work.weight_gradient * columns * hf.hidden_size,
    }
    if work.config.rollout.has_sampling_mask:  # id, row, index in a block and logit of each token in the mask
        out["sampling masks"] = 48 * rows * work.config.rollout.top_k
    if not fused and model.fp32_head and e < FP32:
        out["logits"] = FP32 * rows * columns
        out["fp32 copy of the head"] = FP32 * (columns * hf.hidden_size + hidden)
        out["weight gradient"] += FP32 * columns * hf.hidden_size
    return out
