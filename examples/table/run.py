"""The first environment of docs/environments.md, with the small chat model of `dppo-megatron init`.

    python examples/table/run.py

The start policy is pretrained on conversations in which half of the answers look up the price with the tool, and the
others guess. The environment rewards a price that was looked up.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE))

from my_table import Table  # noqa: E402

from dppo_megatron.common.process import with_this_process  # noqa: E402
from dppo_megatron.report.tail import read_records  # noqa: E402
from dppo_megatron.rollout.environments.tools import Tools  # noqa: E402

ROOT = Path("runs/table")
PRICES = {"tea": 2.5, "milk": 1.2, "rice": 3.1, "salt": 0.8}
TARGET = 0.75


def write_data() -> None:
    """Write prices, questions, and the conversations of the start policy."""
    (ROOT / "prices.json").write_text(json.dumps(PRICES))
    tools = [schema["function"] for schema in Tools(Table(ROOT / "prices.json").tools).schemas]
    system = {"role": "system", "content": f"Tools: {json.dumps(tools)}"}  # as the chat template shows them
    questions, conversations = [], []
    for product, price in PRICES.items():
        asked = f"Price of {product}?"
        call = f"<tool_call>{json.dumps({'name': 'price', 'arguments': {'product': product}})}</tool_call>"
        begun = [system, {"role": "user", "content": asked}]
        looked_up = [*begun, {"role": "assistant", "content": call}, {"role": "tool", "content": str(price)}]
        questions.append({"prompt": asked, "answer": ""})
        conversations += [
            {"prompt": prompt, "answer": answer}
            for prompt, answer in ((begun, call), (begun, "It is 2 euros."), (looked_up, f"It is {price} euros."))
        ]
    for name, rows in (("questions", questions), ("conversations", conversations)):
        (ROOT / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def dppo_megatron(*arguments: str | Path) -> None:
    code = subprocess.run(
        [sys.executable, "-m", "dppo_megatron", *map(str, arguments)], preexec_fn=with_this_process()
    ).returncode
    if code:
        sys.exit(code)


def train(name: str, **settings: object) -> None:
    """Train with the config of `init` and other settings; `__` in a name stands for a dot."""
    changes = {"run.dir": ROOT / name, "data.max_prompt_tokens": 640}
    changes |= {key.replace("__", "."): value for key, value in settings.items()}
    overrides = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    dppo_megatron("train", ROOT / "project/config.yaml", *overrides)


def main() -> int:
    shutil.rmtree(ROOT, ignore_errors=True)
    dppo_megatron("init", ROOT / "project")
    write_data()
    print("== start policy: supervised on conversations of which half use the tool", flush=True)
    train(
        "start",
        objective__name="nll",
        objective__aggregation="token_mean",
        data__train=ROOT / "conversations.jsonl",
        rollout__prompts_per_step=12,
        train__steps=90,
    )
    print("== DPPO with the environment", flush=True)
    train(
        "dppo",
        model__path=ROOT / "start/model",
        data__train=ROOT / "questions.jsonl",
        environment__name="examples.table.my_table:Table",
        environment__settings=json.dumps({"file": str(ROOT / "prices.json")}),
        environment__max_turns=4,
        rollout__max_response_tokens=256,
        optimizer__lr="1e-4",
    )
    records = read_records(ROOT / "dppo/metrics.jsonl")
    rewards = [record["rollout/reward_mean"] for record in records if "rollout/reward_mean" in record]
    print(f"prices looked up, sampled: {rewards[0]:.1%} before, {rewards[-1]:.1%} after")
    return 0 if rewards[-1] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
