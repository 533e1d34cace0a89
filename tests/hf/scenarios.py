"""A tiny model that ranks load, export and save in one layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dppo_megatron import hf
from tests.support.models import build_gpt, logits_of
from tests.support.ranks import megatron_group


@dataclass(frozen=True)
class Case:
    """One model in one layout of two ranks."""

    family: str
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    expert_tensor: int | None = None

    @property
    def name(self) -> str:
        return f"{self.family}-tp{self.tp}-pp{self.pp}-vpp{self.vpp}-ep{self.ep}-etp{self.etp}"

    @property
    def sizes(self) -> dict[str, int]:
        return {"tensor": self.tp, "pipeline": self.pp, "expert": self.ep}

    @property
    def etp(self) -> int:
        return self.expert_tensor or (1 if self.ep > 1 else self.tp)


def round_trip(rank: int, case: Case, source: Path, out: Path, token_ids: torch.Tensor) -> dict[str, Any]:
    """On a rank: loads `source`, saves it to `out`/saved, and returns this rank's norms, names and logits."""
    from megatron.core import parallel_state

    with megatron_group(out, case.tp, case.pp, case.vpp, case.ep, case.etp):
        config = hf.read_hf_config(source)
        chunks = [chunk.eval() for chunk in build_gpt(config, case.tp, case.pp, case.vpp, case.ep, case.etp)]
        hf.load_into(chunks, source)
        # One layer per (virtual) stage or all of them: which HF layer's norm did each one get?
        norms = [[layer.input_layernorm.weight.detach() for layer in chunk.decoder.layers] for chunk in chunks]
        exported = [name for name, _ in hf.export_weights(chunks, config, bucket_bytes=4096)]  # several buckets
        hf.save_hf(chunks, out / "saved", source)
        found = {"norms": norms, "exported": exported}
        if case.pp == 1:
            logits = logits_of(chunks[0], token_ids)
            shards = [torch.empty_like(logits) for _ in range(case.tp)]
            torch.distributed.all_gather(shards, logits, group=parallel_state.get_tensor_model_parallel_group())
            found["logits"] = torch.cat(shards, -1)
        return found
