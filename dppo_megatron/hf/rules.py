"""Defines the weight map types: a rule for many parameters, and an entry that applies it to a layer and expert."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .operations import OfExpert, Operation

_SHARD_UNIT = 128  # head columns per rank, for the GEMM
_SMALL_VOCAB = 4096  # padding a smaller vocabulary to the unit would cost more than it gains


@dataclass(frozen=True, slots=True)
class HFTensor:
    """Describes a safetensors tensor by name and shape. In a rule the name contains {layer} and {expert}."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Describes the Megatron shapes that do not follow from the HF config."""

    padded_vocab_size: int  # embedding rows over all tensor-parallel ranks
    shard_mla_down: bool = False  # MLA down-projections sharded by rows (local spec), else replicated (TE)


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Return how many embedding rows all ranks have together.

    All shards have the same size, a multiple of 128 for a vocabulary size of at least 4096. Example: a vocabulary size
    of 50,257 on 2 ranks gives 50,432 rows.
    """
    unit = tensor_size * (_SHARD_UNIT if vocab_size >= _SMALL_VOCAB else 1)
    return -(-vocab_size // unit) * unit


@dataclass(frozen=True, slots=True)
class Rule:
    """Maps a Megatron parameter in a family to HF tensors, with the operation that combines them.

    `megatron` lists the parameter's spellings: first the local layer spec, then the TransformerEngine spec, which
    keeps a norm inside the linear layer that follows it. {layer} and {expert} are GLOBAL indices.
    """

    megatron: tuple[str, ...]
    hf: tuple[HFTensor, ...]
    op: Operation
    layers: tuple[int, ...] | None = None  # None = not in a layer
    experts: int = 0  # 0 = not an expert's parameter
    duplicate: bool = False  # copies a tensor that another rule exports: the tied head on the last stage
    keep_dtype: bool = False  # never cast on export


@dataclass(frozen=True, slots=True)
class Entry:
    """Applies a rule to one parameter, with a global Megatron name and the HF tensors that form the parameter."""

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
        """Return whether the HF tensor stacks this parameter for all experts in the layer."""
        return isinstance(self.rule.op, OfExpert)

    @property
    def is_expert(self) -> bool:
        """Return whether the expert-tensor-parallel group shards this parameter instead of the tensor-parallel one."""
        return self.rule.experts > 0
