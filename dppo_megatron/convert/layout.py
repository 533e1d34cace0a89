"""Divides a Megatron checkpoint into a file per rank that saves weights."""

from __future__ import annotations

from dataclasses import dataclass

from dppo_megatron.hf import Entry, HFModelConfig


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """Describes the parallel sizes that the files are written for.

    At these sizes each rank reads one file. Megatron also loads the checkpoint at any other sizes. If the stage
    count does not divide the layer count, some stages have one more layer than others.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # tensor parallelism of the experts; None = tensor

    @property
    def expert_tensor_size(self) -> int:
        """Return the tensor-parallel size of the experts."""
        return self.expert_tensor or self.tensor

    def problems(self, config: HFModelConfig) -> list[str]:
        """Return every reason why a model does not fit this layout, as `option = value: why`."""
        sizes = {"--tensor": self.tensor, "--pipeline": self.pipeline, "--expert": self.expert}
        sizes["--expert-tensor"] = self.expert_tensor_size
        if out := [f"{name} = {size}: must be at least 1" for name, size in sizes.items() if size < 1]:
            return out
        moe = config.moe
        divisible = {
            "--tensor": (self.tensor, {
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "intermediate_size": 0 if moe and all(moe.layers) else config.ffn_hidden_size,
                "linear_num_key_heads": config.delta_net.num_key_heads if config.delta_net else 0,
                "the shared experts' size": moe.shared_ffn_hidden_size if moe else 0,
            }),
            "--expert": (self.expert, {"the number of experts": moe.num_experts if moe else self.expert}),
            "--expert-tensor": (self.expert_tensor_size, {"moe_intermediate_size": moe.ffn_hidden_size if moe else 0}),
        }  # fmt: skip
        for option, (size, dims) in divisible.items():
            out += [f"{option} = {size}: does not divide {dim} = {n}" for dim, n in dims.items() if n % size]
        if self.pipeline > config.num_layers:
            out.append(f"--pipeline = {self.pipeline}: more than num_hidden_layers = {config.num_layers}")
        if moe is None:
            expert_sizes = (("--expert", self.expert), ("--expert-tensor", self.expert_tensor or 1))
            out += [f"{option} = {size}: the model has no experts" for option, size in expert_sizes if size > 1]
        return out

    def source_ranks(self, config: HFModelConfig) -> list[SourceRank]:
        """Return the ranks that save weights, stage by stage. They form the first data-parallel replica."""
        width = self.tensor if config.moe is None else max(self.tensor, self.expert_tensor_size * self.expert)
        return [SourceRank(self, stage, rank) for stage in range(self.pipeline) for rank in range(width)]


@dataclass(frozen=True, slots=True)
class SourceRank:
    """Describes a rank in a pipeline stage."""

    layout: TargetLayout
    stage: int
    rank: int

    def shard_of(self, entry: Entry, config: HFModelConfig) -> tuple[int, int] | None:
        """Return (rank, size) in the group that shards an entry, or None if this rank has no shard."""
        layout = self.layout
        if entry.rule.duplicate or self._stage_of(entry, config) != self.stage:
            return None
        if entry.expert is None or config.moe is None:
            return (self.rank, layout.tensor) if self.rank < layout.tensor else None
        size = layout.expert_tensor_size
        expert_rank = entry.expert // (config.moe.num_experts // layout.expert)
        return (self.rank % size, size) if self.rank // size == expert_rank else None

    def _stage_of(self, entry: Entry, config: HFModelConfig) -> int:
        if entry.layer is not None:
            return entry.layer * self.layout.pipeline // config.num_layers
        return 0 if entry.megatron.startswith("embedding.") else self.layout.pipeline - 1
