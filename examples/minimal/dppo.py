"""DPPO on one page: a tiny transformer learns to add, in one process, on a CPU, in about two minutes.

    python examples/minimal/dppo.py            # --help lists the few options

The task is the quickstart's: sums of two two-digit numbers. The model first imitates text in which two of three answers
forget every carry (47+85=22). Reinforcement learning then teaches it to carry; the reward is 1 for the right sum. The
method is `dppo_loss`, thirteen lines, and `train_step`, which calls it. It needs only torch.

A real run also needs the following parts of the package dppo_megatron:

    other methods, top-K divergences, corrections    objectives/ (this loss is build_objective("dppo_binary_tv"))
    a vocabulary sharded over GPUs                   vocab_parallel/
    a large model in parallel, mixed precision       actor/ (Megatron-core)
    fast sampling with slightly other log-probs      engines/ (vLLM, SGLang); weights reach them by weight_sync/
    sampling while training, rewards, failures       orchestrator/, rewards/, fleet/
    rollouts that survive a crash                    bank/; checkpoints in train/actor/checkpoint/
    packed sequences of any length                   data/, train/actor/batch/
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# --- the task -------------------------------------------------------------------------------------------------------

VOCABULARY = "0123456789+=."  # "." ends an answer
END = VOCABULARY.index(".")
PROMPT, RESPONSE = 6, 4  # tokens of "47+85=", and at most of "132."

Pair = tuple[int, int]


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def right(pair: Pair) -> str:
    return str(sum(pair))


def careless(pair: Pair) -> str:
    """Add each column by itself and forget every carry: 47+85=22."""
    a, b = pair
    return f"{(a // 10 + b // 10) % 10}{(a % 10 + b % 10) % 10}"


def prompts(pairs: list[Pair]) -> Tensor:
    """Return token ids [B, PROMPT]."""
    return torch.tensor([encode(f"{a}+{b}=") for a, b in pairs])


def rewards(pairs: list[Pair], responses: Tensor) -> Tensor:
    """Return rewards [B]: 1.0 if the response is the right sum, else 0.0."""
    answers = [encode(right(pair) + ".") for pair in pairs]
    return torch.tensor(
        [float(row[: len(answer)] == answer) for row, answer in zip(responses.tolist(), answers, strict=True)]
    )


# --- the policy -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    """A causal transformer: token ids [B, S] -> logits [B, S, V] of the next token."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(PROMPT + RESPONSE, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(VOCABULARY), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def response_logprob(policy: Policy, prompt: Tensor, response: Tensor) -> Tensor:
    """Return ln pi of every response token, [B, RESPONSE]."""
    logits = policy(torch.cat([prompt, response[:, :-1]], dim=1))[:, PROMPT - 1 :]
    return logits.log_softmax(-1).gather(2, response[..., None])[..., 0]


@torch.no_grad()
def generate(policy: Policy, prompt: Tensor, *, greedy: bool = False) -> tuple[Tensor, Tensor]:
    """Return responses [B, RESPONSE] at temperature 1, and the log-probs of their sampling, ln mu [B, RESPONSE]."""
    ids, logprobs = prompt, []
    for _ in range(RESPONSE):
        choices = policy(ids)[:, -1].log_softmax(-1)
        token = choices.argmax(-1, keepdim=True) if greedy else torch.multinomial(choices.exp(), 1)
        logprobs.append(choices.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    return ids[:, PROMPT:], torch.cat(logprobs, dim=1)


def response_mask(response: Tensor) -> Tensor:
    """Return a mask [B, RESPONSE], True up to and including the token that ends the answer."""
    ended = (response == END).cumsum(1)
    return (ended == 0) | ((ended == 1) & (response == END))


def accuracy(policy: Policy, pairs: list[Pair]) -> float:
    return rewards(pairs, generate(policy, prompts(pairs), greedy=True)[0]).mean().item()


# --- DPPO -----------------------------------------------------------------------------------------------------------


def dppo_loss(logprob: Tensor, rollout_logprob: Tensor, advantage: Tensor, delta: float) -> Tensor:
    """Return the loss of every token: -L of DPPO (arXiv 2602.04879) with the binary total variation as divergence.

        L_t = M_t r_t A_t,   M_t = 0  iff  D_t > delta  and  (A_t > 0 and r_t > 1,  or  A_t < 0 and r_t < 1)

    mu sampled the token a, pi is in training: r = pi(a) / mu(a), D = |pi(a) - mu(a)|. PPO's mask has |r - 1| in place
    of D. It drops a rare token that hardly moved, and lets a frequent token move far. All tensors have the same shape.
    """
    ratio = (logprob - rollout_logprob).exp()
    divergence = (logprob.exp() - rollout_logprob.exp()).abs()
    moving_away = ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))
    mask = ~((divergence > delta) & moving_away)
    return -(mask * ratio * advantage)


@dataclass
class Settings:
    numbers: range = range(10, 100)  # the summands
    warmup_steps: int = 600
    warmup_batch: int = 256
    warmup_lr: float = 2e-3
    steps: int = 150
    prompts: int = 64  # per step
    group: int = 16  # responses to each prompt
    updates: int = 2  # updates per step, each on its share of the prompts
    lr: float = 3e-4
    delta: float = 0.2


def train_step(policy: Policy, optimizer: torch.optim.Optimizer, pairs: list[Pair], s: Settings) -> tuple[float, float]:
    """Sample, reward, update. Return the mean reward, and the share of tokens without gradient because of the mask.

    The first update is on-policy. From the second update on, pi differs from mu and the mask can apply.
    """
    repeated = [pair for pair in pairs for _ in range(s.group)]
    prompt = prompts(repeated)
    response, rollout_logprob = generate(policy, prompt)
    reward = rewards(repeated, response)
    groups = reward.view(-1, s.group)
    advantage = (groups - groups.mean(1, keepdim=True)).view(-1, 1).expand(-1, RESPONSE)  # no division by the std
    carries_loss = response_mask(response)
    dropped = 0.0
    for part in torch.arange(len(repeated)).chunk(s.updates):
        logprob = response_logprob(policy, prompt[part], response[part])
        loss = dppo_loss(logprob, rollout_logprob[part], advantage[part], s.delta)
        # The sum over tokens is divided by the longest length, so tokens of long responses do not count less.
        (loss * carries_loss[part]).sum().div(RESPONSE * len(part)).backward()
        dropped += ((loss == 0) & (advantage[part] != 0) & carries_loss[part]).sum().item()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return reward.mean().item(), dropped / carries_loss.sum().item()


# --- the run --------------------------------------------------------------------------------------------------------


def warm_up(policy: Policy, pairs: list[Pair], s: Settings) -> None:
    """Imitate text that answers every sum three times: once right, twice without the carries."""
    text = [(pair, answer(pair) + ".") for pair in pairs for answer in (right, careless, careless)]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=s.warmup_lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 20) * (1 - n / s.warmup_steps))
    for _ in range(s.warmup_steps):
        batch = random.sample(text, s.warmup_batch)
        response = torch.tensor([encode(answer.ljust(RESPONSE, ".")) for _, answer in batch])
        logprob = response_logprob(policy, prompts([pair for pair, _ in batch]), response)
        mask = response_mask(response)
        (-(logprob * mask).sum() / mask.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def run(s: Settings, seed: int = 1) -> tuple[float, float]:
    """Return the greedy accuracy on held-out sums before and after reinforcement learning."""
    random.seed(seed)
    torch.manual_seed(seed)
    pairs = [(a, b) for a in s.numbers for b in s.numbers]
    random.shuffle(pairs)
    held_out, train = pairs[: len(pairs) // 16], pairs[len(pairs) // 16 :]
    policy, started = Policy(), time.monotonic()
    warm_up(policy, train, s)
    before = after = accuracy(policy, held_out)
    print(f"before: {before:.1%} of held-out sums right, greedily ({time.monotonic() - started:.0f} s)", flush=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=s.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, s.steps + 1):
        reward, dropped = train_step(policy, optimizer, random.sample(train, s.prompts), s)
        if step % 10 == 0 or step == s.steps:
            after = accuracy(policy, held_out)
            print(f"step {step}: reward {reward:.2f}, accuracy {after:.1%}, masked {dropped:.1%}", flush=True)
    print(f"after: {after:.1%} ({time.monotonic() - started:.0f} s in all)")
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=Settings.steps, help="of reinforcement learning")
    parser.add_argument("--delta", type=float, default=Settings.delta, help="DPPO's threshold, a probability")
    arguments = parser.parse_args()
    run(Settings(steps=arguments.steps, delta=arguments.delta), arguments.seed)


if __name__ == "__main__":
    main()
