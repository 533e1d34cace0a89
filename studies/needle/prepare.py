"""Create the needle task and a start policy for each f, once for all runs of the study.

python studies/needle/prepare.py                      # runs/needle, four policies, minutes on two cores
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from needle import NEEDLE, USUAL, make_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from dppo_megatron.common.process import with_this_process

DOSES = (0.1, 0.03, 0.01, 0.003)
TOLERANCE = 1.25  # largest ratio of the policy's f and the text's


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--f", type=float, nargs="*", default=DOSES, help="start probabilities of the right first word")
    parser.add_argument("--seed", type=int, default=1, help="seed of the task and of the random model")
    parser.add_argument("--experts", action="store_true", help="a model with experts, in directories experts-f-F")
    parser.add_argument("--root", type=Path, default="runs/needle", help="has a directory f-F for each f, replaced")
    arguments = parser.parse_args()
    for f in arguments.f:
        place = arguments.root / f"{'experts-' if arguments.experts else ''}f-{f:g}"
        shutil.rmtree(place, ignore_errors=True)
        make_task(place / "task", f, arguments.seed, arguments.experts)
        settings = {
            "run.dir": place / "warmup",
            "run.seed": arguments.seed,
            "model.path": place / "task" / "random_model",
            "data.train": place / "task" / "warmup.jsonl",
        }
        command = [sys.executable, "-m", "dppo_megatron", "train", str(Path(__file__).parent / "warmup.yaml")]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        if code := subprocess.run(command, preexec_fn=with_this_process()).returncode:
            return code
        needle, usual = start_probabilities(place)
        print(f"f = {f:g}: the start policy says {NEEDLE!r} with {needle:.4f}, others with {1 - needle - usual:.4f}")
        if not 1 / TOLERANCE < needle / f < TOLERANCE:
            print(f"its f is off by more than a factor of {TOLERANCE}; use another --seed")
            return 1
    return 0


@torch.no_grad()
def start_probabilities(place: Path) -> tuple[float, float]:
    """Return the mean probabilities of NEEDLE and USUAL as the first word over the held-out prompts."""
    model = AutoModelForCausalLM.from_pretrained(place / "warmup" / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place / "warmup" / "model")
    rows = (place / "task" / "heldout.jsonl").read_text().splitlines()
    ids = torch.tensor([tokenizer.encode(json.loads(row)["prompt"]) for row in rows])
    mean = model(ids).logits[:, -1].softmax(-1).mean(0)
    return tuple(mean[tokenizer.convert_tokens_to_ids([NEEDLE, USUAL])].tolist())


if __name__ == "__main__":
    sys.exit(main())
