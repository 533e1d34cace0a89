"""How a Megatron checkpoint is cut into files: one for each rank of a layout that owns weights."""

from __future__ import annotations

from dataclasses import dataclass

from dppo_megatron.hf import Entry, HFModelConfig


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """Parallel sizes of the ranks that the files are cut for.

    Megatron loads the checkpoint at any other size too; at this one each rank reads one file. Where the stages do
    not divide the layers, some hold one more than others.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None  # tensor parallelism of the experts; None = tensor

    @property
    def experts_over(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.expert_tensor or self.tensor

    def problems(self, config: HFModelConfig) -> list[str]:
        """Every reason why a model cannot be laid out so, each `option = value: why`."""
        out = [
            f"{name} = {size}: must be at least 1"
            for name, size in (
                ("--tensor", self.tensor),
                ("--pipeline", self.pipeline),
                ("--expert", self.expert),
                ("--expert-tensor", self.experts_over),
            )
            if size < 1
        ]
        if out:
            return out
        moe = config.moe
        divided = {
            "--tensor": (self.tensor, {
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "intermediate_size": 0 if moe and all(moe.layers) else config.ffn_hidden_size,
                "the shared experts' size": moe.shared_ffn_hidden_size if moe else 0,
            }),
            "--expert": (self.expert, {"the number of experts": moe.num_experts if moe else self.expert}),
            "--expert-tensor": (self.experts_over, {"moe_intermediate_size": moe.ffn_hidden_size if moe else 0}),
        }  # fmt: skip
        for option, (size, wanted) in divided.items():
            out += [f"{option} = {size}: does not divide {what} = {n}" for what, n in wanted.items() if n % size]
        if self.pipeline > config.num_layers:
            out.append(f"--pipeline = {self.pipeline}: more than num_hidden_layers = {config.num_layers}")
        if moe is None:
            given = (("--expert", self.expert), ("--expert-tensor", self.expert_tensor or 1))
            out += [f"{option} = {size}: the model has no experts" for option, size in given if size > 1]
        return out

    def places(self, config: HFModelConfig) -> list[Place]:
        """The ranks that own weights, stage by stage."""
        width = self.tensor if config.moe is None else max(self.tensor, self.experts_over * self.expert)
        return [Place(self, stage, rank) for stage in range(self.pipeline) for rank in range(width)]


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of one pipeline stage."""

    layout: TargetLayout
    stage: int
    rank: int

    def share(self, entry: Entry, config: HFModelConfig) -> tuple[int, int] | None:
        """(rank, size) of the group that cuts this entry, or None where this rank owns nothing of it."""
        layout = self.layout
        if entry.rule.duplicate or self._stage_of(entry, config) != self.stage:
            return None
        if not entry.is_expert:
            return (self.rank, layout.tensor) if self.rank < layout.tensor else None
        over = layout.experts_over
        owner = entry.expert // (config.moe.num_experts // layout.expert)
        return (self.rank % over, over) if self.rank // over == owner else None

    def _stage_of(self, entry: Entry, config: HFModelConfig) -> int:
        if entry.layer is not None:
            return entry.layer * self.layout.pipeline // config.num_layers
        return 0 if entry.megatron.startswith("embedding.") else self.layout.pipeline - 1
