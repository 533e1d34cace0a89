"""Draw each token of a bank by its ratio and its change of probability between the engine and given weights.

    python tools/draw_token_shift.py RUN/bank --model DIR [--groups 64] [--dtype float32] [--out token_shift.png]

The picture follows figure 1 of DPPO (arXiv 2602.04879). With the weights that sampled, it shows the mismatch of engine
and trainer; with later weights, the change by training. `--model` is a Hugging Face directory: the start model or an
export. Transformers scores the tokens in place of the trainer. The title has the shares of tokens outside PPO's and
DPPO's regions. Groups with several turns or a sampling mask are skipped and counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dppo_megatron.bank import BankReader
from dppo_megatron.types import RolloutGroup

EPSILON, DELTA = 0.2, 0.15  # PPO's clip; DPPO's threshold


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bank", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=64, help="use the last groups of the bank; 0 = all")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("token_shift.png"))
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM

    reader = BankReader(arguments.bank)
    reader.refresh()
    first = max(0, reader.num_groups - arguments.groups) if arguments.groups else 0
    groups = [reader.read(entry) for entry in reader.entries(first, reader.num_groups)]
    fit = [group for group in groups if all(r.spans is None and r.sampling_mask_ids is None for r in group.rollouts)]
    if not fit:
        sys.exit(f"{arguments.bank}: no group of one turn, sampled from the whole vocabulary, among {len(groups)}")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).to(arguments.device).eval()
    mu, pi = token_logprobs(model, fit)
    shares = draw(mu, pi, arguments.out)
    print(f"{len(mu):,} tokens of {len(fit)} groups, {len(groups) - len(fit)} left out; {arguments.out}")
    for region, share in shares.items():
        print(f"outside {region}: {share:.3%}")
    return 0


@torch.no_grad()
def token_logprobs(model: torch.nn.Module, groups: Iterable[RolloutGroup]) -> tuple[np.ndarray, np.ndarray]:
    """Return (ln mu, ln pi) of every response token, [tokens] fp32. pi is the model at the temperature of the group."""
    mu, pi = [], []
    for group in groups:
        prompt = torch.from_numpy(group.prompt.token_ids).long()
        responses = [torch.from_numpy(rollout.token_ids).long() for rollout in group.rollouts]
        rows: Tensor = torch.nn.utils.rnn.pad_sequence([torch.cat([prompt, r]) for r in responses], batch_first=True)
        # Padding comes after all scored tokens, so causal attention needs no padding mask.
        logits = model(input_ids=rows.to(model.device), use_cache=False).logits[:, len(prompt) - 1 : -1]
        logprobs = (logits.float() / group.temperature).log_softmax(-1).cpu()
        sampled = logprobs.gather(2, rows[:, len(prompt) :, None]).squeeze(2)
        for rollout, response, row in zip(group.rollouts, responses, sampled, strict=True):
            mu.append(rollout.rollout_logprob)
            pi.append(row[: len(response)].numpy())
    return np.concatenate(mu), np.concatenate(pi)


def draw(mu: np.ndarray, pi: np.ndarray, path: Path) -> dict[str, float]:
    """Write the PNG. Return the shares of tokens outside PPO's and DPPO's regions."""
    from matplotlib.figure import Figure

    log_ratio, shift = pi - mu, np.exp(pi) - np.exp(mu)
    shares = {
        f"PPO's clip, r within 1 ± {EPSILON:g}": float((np.abs(np.expm1(log_ratio)) > EPSILON).mean()),
        f"DPPO's region, |pi - mu| within {DELTA:g}": float((np.abs(shift) > DELTA).mean()),
    }
    figure = Figure(figsize=(7.5, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    dots = axes.scatter(shift, log_ratio, c=mu / np.log(10), s=4, cmap="viridis", linewidths=0, rasterized=True)
    for bound in (np.log(1 - EPSILON), np.log(1 + EPSILON)):
        axes.axhline(bound, color="#D55E00", lw=1)
    for bound in (-DELTA, DELTA):
        axes.axvline(bound, color="#0072B2", lw=1)
    axes.set_xlabel("pi - mu, shift of the probability")
    axes.set_ylabel("ln pi / mu")
    axes.set_title("; ".join(f"outside {region}: {share:.2%}" for region, share in shares.items()), fontsize=8)
    figure.colorbar(dots, label="log10 mu")
    figure.savefig(path)
    return shares


if __name__ == "__main__":
    sys.exit(main())
