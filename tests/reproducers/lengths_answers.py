"""A given answer (nll) longer than the model has positions must be rejected, at the start and when it is read.

Run from a clone's root: PYTHONPATH=. OMP_NUM_THREADS=1 python tests/reproducers/lengths_answers.py
"""

import json
import sys
import tempfile
from pathlib import Path

from dppo_megatron.data.prompts import training_prompts
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf.small_model import chat_tokenizer, write_small_model
from dppo_megatron.run.checks import preflight
from dppo_megatron.train.trainer.batches import SupervisedBatches
from tests.support.configs import make_config

work = Path(tempfile.mkdtemp())
write_small_model(work / "model", 0, chat_tokenizer(positions=64))
(work / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2" * 500}) + "\n")
sft = make_config(
    run={"dir": str(work / "run")},
    model={"path": str(work / "model"), "dtype": "fp32"},
    data={"train": str(work / "train.jsonl")},
    objective={"name": "nll"},
    rollout={"prompts_per_step": 1, "group_size": 1},
)
tokenizer = load_tokenizer(work / "model")
trained = 0
for name, read in (
    ("the batch", lambda: SupervisedBatches(sft, training_prompts(sft, tokenizer), tokenizer, 0, 1).read(0)),
    ("the start", lambda: preflight(sft, "config.yaml", place="elsewhere")),
):
    try:
        read()
        trained += 1
        print(f"WRONG: {name} accepts 500 tokens for a model with 64 positions")
    except ExpectedError as error:
        print(f"right: {name}: {error}")
sys.exit(bool(trained))
