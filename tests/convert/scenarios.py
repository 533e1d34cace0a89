"""Ranks with Megatron's own models and loader, and with the trainer's actor."""

from pathlib import Path

import torch

from dppo_megatron import hf
from tests.hf.scenarios import Case
from tests.support.actor_ranks import started_actor
from tests.support.configs import make_config
from tests.support.models import build_gpt
from tests.support.ranks import megatron_group, rendezvous

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def load_with_megatron(rank: int, case: Case, root: Path) -> None:
    """Compare weights loaded by Megatron's `dist_checkpointing.load` with those of our own loader."""
    from megatron.core import dist_checkpointing

    directory = root / "groups" / case.name
    directory.mkdir(parents=True, exist_ok=True)
    with megatron_group(directory, case.tp, case.pp, ep=case.ep):
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


def save_with_actor(rank: int, case: Case, root: Path) -> None:
    """A training checkpoint in this layout, and the HF directory that the same actor exports."""
    from dppo_megatron.hf import save_hf

    model, out = root / "models" / case.family, root / "runs" / case.name
    config = make_config(
        run={"dir": str(out)},
        model={"path": str(model), "dtype": "bf16", "weights": str(root / "megatron" / case.family)},
        parallel={"world_size": 2, "timeout_s": 60, "sequence": case.tp > 1, **case.sizes},
    )
    out.mkdir(parents=True, exist_ok=True)
    rendezvous(out)
    with started_actor(config) as actor:
        actor.load_hf(config.model.start)
        actor.save_checkpoint(out / "checkpoints", 3, {}, keep=1)
        save_hf(actor.model_chunks, out / "exported", model)
