"""A resumed run whose data.train has other rows trains rows twice or never: every such resume must be rejected.

Run from a clone's root: PYTHONPATH=. OMP_NUM_THREADS=1 python tests/reproducers/changed_data.py
"""

import json
import sys
import tempfile
from pathlib import Path

from dppo_megatron.data.prompts import training_prompts
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.hf.small_model import chat_tokenizer, write_small_model
from dppo_megatron.run.checks.resume import changed_settings, record
from tests.support.configs import make_config

work = Path(tempfile.mkdtemp())
data = work / "train.jsonl"
config = make_config(
    run={"dir": str(work / "run")}, model={"path": str(work / "model")}, data={"train": str(data)}
)  # fmt: skip
write_small_model(work / "model", 0, chat_tokenizer())
rows = [json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) for n in range(200)]


def order(rows):
    data.write_text("\n".join(rows) + "\n")
    prompts = training_prompts(config, load_tokenizer(work / "model"))
    return [prompts.prompt(position).text for position in range(len(rows))]


whole, new = order(rows), json.dumps({"prompt": "a new one", "answer": "1"})
config.run.dir.mkdir()
record(config)
missed = len(changed_settings(config, config))  # the same rows
for change, now in (("appended", [*rows, new]), ("inserted first", [new, *rows]), ("first removed", rows[1:])):
    done, rest = whole[:100], order(now)[100:]
    problems = changed_settings(config, config)
    missed += not problems
    print(f"row {change} after 100 of 200 prompts: {len({*done} & {*rest})} would be trained twice in the epoch,")
    print(f"  {len({*whole} - {*done} - {*rest})} never; problems at the resume: {problems}")
sys.exit(bool(missed))
