"""TRL's side of `end_to_end.py`: the published GRPOTrainer in TRL's own environment, with its parts timed.

    .venv-integrations/bin/python benchmarks/end_to_end_trl.py CELL DIRECTORY RECORDS [--steps N] [--every N]

DIRECTORY has `model/` and `prompts.jsonl`, with --every also `heldout.jsonl`. Appends a line to RECORDS for each step.
The last line is a plain step of transformers: forward and backward on the last samples, with the mean log-prob of the
responses as its loss and without an optimizer. TRL's behaviour is unchanged; methods are overridden only for timing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from end_to_end_task import CELLS, LANGUAGE_MODEL, QUICKSTART, Cell, even, last_number
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_objectives import accuracy, right

PLAIN_STEPS = 3  # the first one warms up


class Clock:
    """Measure the seconds of named parts since the last `take`; a part inside another counts in both."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def take(self) -> Counter[str]:
        taken, self._seconds = self._seconds, Counter()
        return taken


class TimedGRPO(GRPOTrainer):
    """GRPOTrainer that times sampling and scoring, and keeps the last samples."""

    clock: Clock
    sampled: dict[str, torch.Tensor]

    def _generate(self, prompts: list) -> Any:
        with self.clock("sample"):
            return super()._generate(prompts)

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        with self.clock("sample and score"):
            self.sampled = super()._generate_and_score_completions(inputs)
        return self.sampled

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.clock("training step"):
            return super().training_step(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        running = ExitStack()
        optimizer.register_step_pre_hook(lambda *_: running.enter_context(self.clock("optimizer")))
        optimizer.register_step_post_hook(lambda *_: running.close())
        return optimizer


class Records(TrainerCallback):
    """Write a line for each step (`updates` steps of TRL's trainer), and every `every` steps measure the accuracy."""

    def __init__(self, path: Path, updates: int, evaluate: Callable[[], float] | None, every: int):
        self._path, self._updates, self._evaluate, self._every = path, updates, evaluate, every
        self.trainer: TimedGRPO

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._evaluate_if_due(0)
        self._begun = time.perf_counter()

    def on_step_end(self, _arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step % self._updates:
            return
        step, seconds = state.global_step // self._updates, time.perf_counter() - self._begun
        parts = self.trainer.clock.take()
        scored = parts["sample and score"]
        self._append(
            {
                "step": step,
                "time": time.time(),
                "step_s": seconds,
                "sample": parts["sample"],
                "score": scored - parts["sample"],
                "forward and backward": parts["training step"] - scored,
                "optimizer": parts["optimizer"],
                "response_tokens": int(self.trainer.sampled["completion_mask"].sum()),
            }
        )
        self._evaluate_if_due(step)
        self._begun = time.perf_counter()

    def append_plain(self, seconds: float) -> None:
        self._append({"plain_s": seconds})

    def _evaluate_if_due(self, step: int) -> None:
        if self._evaluate is not None and step % self._every == 0:
            self._append({"step": step, "accuracy": self._evaluate()})

    def _append(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", choices=CELLS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--steps", type=int, help="default: the cell's")
    parser.add_argument("--every", type=int, default=0, help="steps between greedy accuracies; 0 = none")
    parser.add_argument("--micro-batch", type=int, help="sequences of a forward and backward pass; default: the cell's")
    arguments = parser.parse_args()
    cell = CELLS[arguments.cell]
    micro_batch = arguments.micro_batch or cell.trl_micro_batch or cell.sequences // cell.updates
    reward = {QUICKSTART: right, LANGUAGE_MODEL: last_number}.get(cell.name, even)
    steps = arguments.steps or cell.warm + cell.timed
    model_path = str(arguments.directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32")
    evaluate = None
    if arguments.every:
        rows = [json.loads(line) for line in (arguments.directory / "heldout.jsonl").read_text().splitlines()]

        def evaluate() -> float:
            return accuracy(model, tokenizer, rows, cell.response, reward)

    records = Records(arguments.records, cell.updates, evaluate, arguments.every)
    prompts = str(arguments.directory / "prompts.jsonl")
    trainer = TimedGRPO(
        model,
        reward,
        args=settings(cell, steps, micro_batch, arguments.records.parent),
        train_dataset=Dataset.from_json(prompts, cache_dir=str(arguments.directory / "datasets")),
        processing_class=tokenizer,
        callbacks=[records],
    )
    trainer.clock, records.trainer = Clock(), trainer
    trainer.train()
    records.append_plain(plain_step(trainer.model, trainer.sampled, micro_batch))


def settings(cell: Cell, steps: int, micro_batch: int, output: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(output / "trl"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=cell.sequences // cell.updates // micro_batch,
        steps_per_generation=cell.sequences // micro_batch,
        num_generations=cell.samples,
        max_completion_length=cell.response,
        max_steps=steps * cell.updates,
        learning_rate=cell.lr,
        lr_scheduler_type="constant",
        loss_type="dr_grpo",
        scale_rewards="none",
        gradient_checkpointing=False,  # the default recomputes the forward pass to save memory
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=10 * steps * cell.updates,
        disable_tqdm=True,
    )


def plain_step(model: torch.nn.Module, sampled: dict[str, torch.Tensor], micro_batch: int) -> float:
    """Return the seconds of transformers' forward and backward on all sampled sequences, in TRL's micro-batches.

    Prompts of a batch have equal length or are padded, as in TRL's training.
    """
    tokens = torch.cat((sampled["prompt_ids"], sampled["completion_ids"]), dim=1)
    mask = torch.cat((sampled["prompt_mask"], sampled["completion_mask"]), dim=1)
    response = sampled["completion_ids"].shape[1]
    seconds = []
    for _ in range(PLAIN_STEPS):
        started = time.perf_counter()
        for part, seen in zip(tokens.split(micro_batch), mask.split(micro_batch), strict=True):
            logits = model(input_ids=part, attention_mask=seen, logits_to_keep=response + 1).logits[:, :-1]
            targets = part[:, -response:].masked_fill(seen[:, -response:] == 0, -100)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            model.zero_grad()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
