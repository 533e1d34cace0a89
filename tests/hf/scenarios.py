"""Two real ranks over gloo that load, export and save tiny models in many layouts, in one spawn."""

from __future__ import annotations

import os
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp

from dppo_megatron import hf


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
    def etp(self) -> int:
        return self.expert_tensor or (1 if self.ep > 1 else self.tp)


def run_cases(cases: list[Case], root: Path, token_ids: torch.Tensor) -> None:
    """Each case loads `root/models/<family>` and writes into `root/<name>` what it did, or `error.<rank>`."""
    mp.spawn(_rank, args=(2, cases, root, token_ids, root / "rendezvous"), nprocs=2)


def _rank(rank: int, world: int, cases: list[Case], root: Path, token_ids: torch.Tensor, store: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    from dppo_megatron.actor.cpu import without_cuda

    without_cuda.install()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for case in cases:
        out = root / case.name
        out.mkdir(exist_ok=True)
        try:
            _run(case, root / "models" / case.family, out, rank, token_ids)
        except Exception:
            (out / f"error.{rank}").write_text(traceback.format_exc())
    torch.distributed.destroy_process_group()


def _run(case: Case, source: Path, out: Path, rank: int, token_ids: torch.Tensor) -> None:
    from megatron.core import parallel_state, tensor_parallel

    from tests.support.models import build_gpt, logits_of

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = hf.read_hf_config(source)
    chunks = [chunk.eval() for chunk in build_gpt(config, case.tp, case.pp, case.vpp, case.ep, case.etp)]
    hf.load_into(chunks, source)
    # One layer per (virtual) stage or all of them: which HF layer's norm did each one get?
    norms = [[layer.input_layernorm.weight.detach() for layer in chunk.decoder.layers] for chunk in chunks]
    torch.save(norms, out / f"norms.{rank}.pt")
    owned = [name for name, _ in hf.export_weights(chunks, config, bucket_bytes=4096)]  # several buckets
    (out / f"owned.{rank}").write_text("\n".join(owned))
    hf.save_hf(chunks, out / "saved", source)
    if case.pp == 1:
        logits = logits_of(chunks[0], token_ids)
        shards = [torch.empty_like(logits) for _ in range(case.tp)]
        torch.distributed.all_gather(shards, logits, group=parallel_state.get_tensor_model_parallel_group())
        if rank == 0:
            torch.save(torch.cat(shards, -1), out / "logits.pt")
