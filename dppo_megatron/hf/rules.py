"""Defines the types of the weight map: a rule for many parameters, and its instance for one layer and expert."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .operations import OfExpert, Operation

_SHARD_UNIT = 128  # columns of the head per rank, for its GEMM
_SMALL_VOCAB = 4096  # padding a smaller vocabulary to the unit would cost more than it gains


@dataclass(frozen=True, slots=True)
class HFTensor:
    """Names one tensor in the safetensors files and its shape. In a rule the name contains {layer} and {expert}."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Describes the shapes of the Megatron model that do not follow from the HF config."""

    padded_vocab_size: int  # rows of the embedding over all tensor-parallel ranks
    shard_mla_down: bool = False  # MLA down-projections sharded by rows (local spec), else replicated (TE)


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Return the rows of the embedding over all ranks. Shards are equal, and multiples of 128 for large vocabularies.

    Example: a vocabulary of 50,257 on 2 ranks has 50,432 rows.
    """
    unit = tensor_size * (_SHARD_UNIT if vocab_size >= _SMALL_VOCAB else 1)
    return -(-vocab_size // unit) * unit


@dataclass(frozen=True, slots=True)
class Rule:
    """Maps one Megatron parameter of a family to its HF tensors, with the operation that combines them.

    `megatron` lists the spellings of one parameter: first the local layer spec, then the TransformerEngine spec, which
    keeps a norm inside the linear layer that follows it. {layer} and {expert} are GLOBAL indices.
    """

    megatron: tuple[str, ...]
    hf: tuple[HFTensor, ...]
    op: Operation
    layers: tuple[int, ...] | None = None  # None = not in a layer
    experts: int = 0  # 0 = not an expert's parameter
    duplicate: bool = False  # a copy of a tensor that another rule exports: the tied head of the last stage
    keep_dtype: bool = False  # never cast on export

    @property
    def is_expert(self) -> bool:
        return self.experts > 0


@dataclass(frozen=True, slots=True)
class Entry:
    """Applies a rule to one parameter: its global Megatron name and the HF tensors that it consists of."""

    megatron: str
    hf: tuple[HFTensor, ...]
    rule: Rule
    layer: int | None
    expert: int | None

    @property
    def op(self) -> Operation:
        op = self.rule.op
        return replace(op, expert=self.expert) if isinstance(op, OfExpert) and self.expert is not None else op

    @property
    def stacks_experts(self) -> bool:
        """Return whether the HF tensor has this parameter of all experts of the layer."""
        return isinstance(self.rule.op, OfExpert)

    @property
    def is_expert(self) -> bool:
        """Return whether the expert-tensor-parallel group shards this parameter instead of the tensor-parallel one."""
        return self.rule.is_expert
