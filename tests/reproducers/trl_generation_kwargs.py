"""Exit with 1 if ObjectiveTrainer accepts settings that change the distribution of sampled tokens.

For samples of the scored policy the mean of -ln pi equals its mean entropy (row "plain", within noise of 60 tokens).
Run from a clone's root with trl 1.16 installed:
PYTHONPATH=. OMP_NUM_THREADS=1 python tests/reproducers/trl_generation_kwargs.py [settings of GRPOConfig as JSON ...]
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from dppo_megatron.objectives import ObjectiveError
from tests.integrations.test_trl import trainer

warnings.filterwarnings("ignore")
CASES = {
    "plain": {},
    "greedy": {"generation_kwargs": {"do_sample": False}},
    "beams": {"generation_kwargs": {"num_beams": 2}},
}
CASES |= {text: json.loads(text) for text in sys.argv[1:]}
wrong = False
for name, settings in CASES.items():
    with tempfile.TemporaryDirectory() as directory:
        try:
            own = trainer(Path(directory), own={"objective": "dppo_binary_tv"}, **settings)
        except ObjectiveError as error:
            wrong |= name == "plain"
            print(f"{name}: rejected: {str(error)[:90]}")
            continue
        with torch.no_grad():
            own.model.train()
            batch = own._generate_and_score_completions(next(iter(own.get_train_dataloader())))
            logprob, entropy, _ = own._policy(own.model, batch)
            mask = batch["completion_mask"].bool()
        surprise, expected = -float(logprob[mask].mean()), float(entropy[mask].mean())
        wrong |= name in ("greedy", "beams") or abs(surprise - expected) > 0.5
        print(f"{name}: accepted; mean of -ln pi {surprise:.2f}, entropy {expected:.2f}")
sys.exit(wrong)
