"""Two ranks with Megatron's own models and loader, and with the trainer's actor, in one spawn."""

from __future__ import annotations

import os
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp


@dataclass(frozen=True)
class Case:
    """A family in a layout of two ranks."""

    family: str
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def name(self) -> str:
        return f"{self.family}-tp{self.tp}-pp{self.pp}-ep{self.ep}"


def run(megatron: list[Case], actor: list[Case], root: Path) -> None:
    """Reads `root/models` and `root/megatron`; leaves `root/NAME.RANK` with "ok" or a traceback, and checkpoints."""
    mp.spawn(_rank, args=(megatron, actor, root), nprocs=2)


def _rank(rank: int, megatron: list[Case], actor: list[Case], root: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from dppo_megatron.actor.cpu import without_cuda

    without_cuda.install()
    from megatron.core import parallel_state

    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    store = root / "rendezvous"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for case in megatron:
        _noted(root / f"{case.name}.{rank}", lambda case=case: _load_with_megatron(case, root))
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    for index, case in enumerate(actor):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=(root / "ports").read_text().split()[index])
        _noted(root / f"actor-{case.name}.{rank}", lambda case=case: _save_with_actor(case, root))


def _noted(note: Path, act) -> None:
    try:
        act()
        note.write_text("ok")
    except Exception:
        note.write_text(traceback.format_exc())


def _load_with_megatron(case: Case, root: Path) -> None:
    """Megatron's `dist_checkpointing.load` fills the model with what our own loader reads from the HF directory."""
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    from dppo_megatron import hf
    from tests.support.models import build_gpt

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1 if case.ep > 1 else case.tp,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = hf.read_hf_config(root / "models" / case.family)
    loaded, expected = (build_gpt(config, case.tp, case.pp, None, case.ep) for _ in range(2))
    hf.load_into(expected, root / "models" / case.family)
    state = loaded[0].sharded_state_dict()
    # A weights-only checkpoint has no state of TransformerEngine's modules.
    wanted = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    result = dist_checkpointing.load({"model": wanted}, str(root / "megatron" / case.family))
    missing, unexpected = loaded[0].load_state_dict(result["model"], strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith("_extra_state") for name in missing), missing
    for (name, a), (_, b) in zip(loaded[0].state_dict().items(), expected[0].state_dict().items(), strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), name


def _save_with_actor(case: Case, root: Path) -> None:
    """A training checkpoint in this layout, and the HF directory that the same actor exports."""
    from dppo_megatron.actor import Actor, init_layout
    from dppo_megatron.config import Config
    from dppo_megatron.hf import save_hf

    model, out = root / "models" / case.family, root / "runs" / case.name
    config = Config.model_validate(
        {
            "run": {"dir": str(out)},
            "model": {"path": str(model), "dtype": "bf16", "weights": str(root / "megatron" / case.family)},
            "parallel": {
                "world_size": 2,
                "tensor": case.tp,
                "pipeline": case.pp,
                "expert": case.ep,
                "timeout_s": 60,
                "sequence": case.tp > 1,
            },
            "train": {"steps": 1},
            "data": {"train": "unused"},
        }
    )
    layout = init_layout(config)
    try:
        actor = Actor(config, layout)
        actor.load_hf(config.model.start)
        actor.save_checkpoint(out / "checkpoints", 3, {}, keep=1)
        save_hf(actor.model_chunks, out / "exported", model)
    finally:
        layout.close()
