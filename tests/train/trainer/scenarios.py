"""The real training loop on the tiny bank, as ranks run it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dppo_megatron.config.model import AcceptanceConfig
from tests.support.ranks import megatron_group, rendezvous
from tests.support.tiny_task import EOS, task_config


def train_cases(rank: int, cases: dict[str, dict[str, Any]], task: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """On a rank: train each case (sections of the config by name) over all ranks; return this rank's records."""
    from dppo_megatron.train.actor import init_layout

    seen = {}
    for name, sections in cases.items():
        rendezvous(directory)
        layout = init_layout(task_config(task, **sections))
        try:
            seen[name] = train_one(task_config(task, **sections), layout)
        finally:
            layout.close()
    return seen


def measured_divergence(rank: int, directory: Path, statistic: str, mask: list[bool]) -> float:
    """On a rank: the statistic of TV over tokens whose rollout probability is 1/2 and whose policy moved it by
    0.1 (rank + 1); rows outside `mask` moved by 0.5."""
    import torch

    from dppo_megatron.objectives import build_objective
    from dppo_megatron.train.trainer.acceptance import Acceptance

    mask = torch.tensor(mask[: len(mask) - rank])  # ranks hold different numbers of tokens
    tokens = SimpleNamespace(mask=mask, rollout_logprob=torch.full(mask.shape, 0.5).log())
    moved = torch.where(mask, 0.1 * (rank + 1), 0.5)
    scores = SimpleNamespace(logprob=(0.5 - moved).log())
    config = SimpleNamespace(
        run=SimpleNamespace(seed=0), acceptance=AcceptanceConfig(bound=1.0, divergence="binary_tv", statistic=statistic)
    )
    with megatron_group(directory):
        layout = SimpleNamespace(device=torch.device("cpu"), data_group=None)
        actor = SimpleNamespace(layout=layout, scores=lambda part, topk: [scores] * len(part))
        return Acceptance(config, actor, build_objective("dppo_binary_tv"))._measure([tokens])


def train_one(config, layout) -> dict[str, Any]:
    """Trains from the task's model to the end; the log's head, every update's stats and every step's record."""
    from dppo_megatron.bank import BankReader
    from dppo_megatron.objectives import build_objective
    from dppo_megatron.train.actor import Actor
    from dppo_megatron.train.trainer.acceptance import Acceptance
    from dppo_megatron.train.trainer.batches import BankBatches, SupervisedBatches
    from dppo_megatron.train.trainer.loop import Training
    from dppo_megatron.train.trainer.main import head
    from dppo_megatron.train.trainer.policy_logprobs import PolicyLogprobs
    from dppo_megatron.train.trainer.token_log import TokenLog

    objective = build_objective(config.objective.name, **config.objective.settings)
    actor = Actor(config, layout)
    actor.load_hf(config.model.path)
    share = layout.data_parallel_rank, layout.data_parallel_size
    if config.objective.supervised:
        source = SupervisedBatches(config, BankPrompts(config), Tokenizer(), *share)
    else:
        source = BankBatches(config, BankReader(config.rollout.bank), objective, *share)
    updates, records = [], []
    train_update = actor.train_update

    def observed(micro_batches, method, **follows):
        updates.append(train_update(micro_batches, method, **follows))
        return updates[-1]

    actor.train_update = observed
    steps = Training(
        config=config,
        actor=actor,
        objective=objective,
        source=source,
        policy_logprobs=PolicyLogprobs(actor, objective),
        acceptance=Acceptance(config, actor, objective),
        publisher=None,
        checkpoints=SimpleNamespace(due=lambda step: False),
        control=SimpleNamespace(wait_until_ready=lambda source, step, publisher: source.ready(step)),
        recorder=SimpleNamespace(
            log=lambda step, metrics: records.append(metrics),
            log_masked=lambda step, counts: records[-1].update(masked_tokens=dict(counts)),
        ),
        token_log=TokenLog(config, layout, None),
        step=0,
    ).run()
    return {
        "weights": [parameter.detach().float().clone() for c in actor.model_chunks for parameter in c.parameters()],
        "head": head(config, actor, objective),
        "steps": steps,
        "records": records,
        "updates": [{"loss": u.loss, "grad_norm": u.grad_norm, "skipped": u.skipped, **u.metrics} for u in updates],
    }


class BankPrompts:
    """The bank's prompts with their answers, as `PromptSource` gives them."""

    def __init__(self, config):
        from dppo_megatron.bank import BankReader

        reader = BankReader(config.rollout.bank)
        self._prompts = [reader.read(entry).prompt for entry in reader.entries(0, reader.refresh())]

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, position: int):
        return self._prompts[position]


class Tokenizer:
    eos_token_id = EOS

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]
