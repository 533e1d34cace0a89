"""Predicts how much `engine.draft_tokens` gains by decoding a run's stored samples again, with drafts.

Stored tokens were drawn from the policy, so a draft is accepted here if it equals the stored token. That happens with
the probability that the policy gave the draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np

from dppo_megatron.bank import BankReader
from dppo_megatron.bank.earlier import GROUPS, PROMPT_TOKENS, sequences
from dppo_megatron.config import Config
from dppo_megatron.engines.drafts import SUFFIXES, DraftRate, SuffixIndex
from dppo_megatron.errors import ExpectedError

MOST_GROUPS = 256  # newest groups that are decoded again
TOKENS = 64  # response tokens in each column of the table
DEFAULT_TOKENS = 8  # drafted tokens if the config drafts none

StepTime = Callable[[int], float]
"""Returns how many seconds a decoding step takes with a number of rows: a row per sample and per drafted token.

For 0 rows it returns the seconds to start a group (requests and prompts).
"""


class DraftsError(ExpectedError, ValueError):
    """Raised for a run or step times that cannot be used; the message names the option and the remedy."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Contains a group's samples, [tokens] int32, and earlier groups' samples, which begin with the prompt end."""

    prompt: np.ndarray  # [at most PROMPT_TOKENS] int32
    samples: list[np.ndarray]
    earlier: list[np.ndarray]
    epoch: int  # number of earlier groups of the prompt in the bank


@dataclass(slots=True)
class Decoded:
    """Contains the result of decoding samples again.

    `accepted` maps (epoch, table column) to the number of accepted tokens in each step that may draft.
    """

    seconds: float
    drafted: int
    accepted: dict[tuple[int, int], list[int]]


@dataclass(slots=True, eq=False)
class _Decoding:
    """Describes a sample being decoded. `tokens` has the prompt end and the response; `place` is the next token."""

    group: StoredGroup
    index: SuffixIndex
    tokens: np.ndarray
    place: int


def parse_step_times(text: str) -> StepTime:
    """Parse "ROWS:MS ROWS:MS ..." into a step time that is linear in between. Raises `DraftsError`.

    0:MS is the time to start a group, by default 0.
    """
    try:
        times = {int(rows): float(ms) / 1e3 for rows, ms in (word.split(":") for word in text.split())}
        start_s = times.pop(0, 0.0)
        rows, seconds = zip(*sorted(times.items()), strict=True)
    except ValueError:
        raise DraftsError(f"--step-ms {text!r}: expected rows and milliseconds such as '1:9 8:12 32:25'") from None
    if rows[0] < 0 or min(seconds) <= 0 or start_s < 0:
        raise DraftsError(f"--step-ms {text!r}: rows and milliseconds must be above 0")
    slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0

    def step_s(num_rows: int) -> float:
        return float(np.interp(num_rows, rows, seconds)) + max(0, num_rows - rows[-1]) * slope if num_rows else start_s

    return step_s


def read_groups(run: Path) -> list[StoredGroup]:
    """Return the newest groups in a run's bank, in bank order. Raises `DraftsError` and `BankError`."""
    reader = BankReader(run / "bank" if (run / "bank").is_dir() else run)
    entries = reader.entries(0, reader.refresh())
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    earlier_numbers: list[list[int]] = []
    for entry in entries:
        earlier_numbers.append(list(numbers[entry.row]))
        numbers[entry.row].append(entry.number)
    if not entries:
        raise DraftsError(f"--speculation {run}: no bank with groups; name a run or its bank")
    groups = []
    for entry in entries[-MOST_GROUPS:]:
        group = reader.read(entry, parts=("core",))
        tail = group.prompt.token_ids[-PROMPT_TOKENS:]
        earlier_groups = (
            reader.read(entries[number], parts=("core",)) for number in earlier_numbers[entry.number][-GROUPS:]
        )
        earlier = [sequence for other in earlier_groups for sequence in sequences(other, group.prompt)]
        samples = [rollout.token_ids for rollout in group.rollouts if len(rollout.token_ids)]
        groups.append(StoredGroup(tail, samples, earlier, len(earlier_numbers[entry.number])))
    return groups


def decode(
    groups: Sequence[StoredGroup], *, together: int, running: int, batch: int, max_drafts: int, step_s: StepTime
) -> Decoded:
    """Decode groups on one engine, with at most `max_drafts` drafted tokens per sample and step.

    The engine gets `together` groups at once, so fewer samples run when these groups end. It runs at most `running`
    samples, and makes drafts while at most `batch` samples run. Drafts follow samples of earlier groups and finished
    samples of this group.
    """
    queue, acceptance = (group for group in groups if group.samples), DraftRate()
    waiting, active = list[_Decoding](), list[_Decoding]()
    result = Decoded(0.0, 0, defaultdict(list))
    while True:
        for group in islice(queue, together - len({id(one.index) for one in (*waiting, *active)})):
            result.seconds += step_s(0)
            index = SuffixIndex(acceptance)
            for tokens in group.earlier:
                index.add(tokens)
            first = len(group.prompt)
            waiting += [_Decoding(group, index, np.concatenate([group.prompt, t]), first) for t in group.samples]
        started = running - len(active)
        active, waiting = active + waiting[:started], waiting[started:]
        if not active:
            return result
        rows = running_samples = len(active)
        drafts = max_drafts if rows <= batch else 0
        for one in active:
            place, accepted = one.place, 0
            room = min(drafts, len(one.tokens) - place - 1)
            if room > 0:
                suffix = one.tokens[max(0, place - max(SUFFIXES)) : place]
                draft, shares = one.index.draft(suffix, room, running_samples)
                if draft:
                    wrong = np.flatnonzero(one.tokens[place : place + len(draft)] != draft)
                    accepted = int(wrong[0]) if len(wrong) else len(draft)
                    one.index.tested(shares, accepted)
                    rows += len(draft)
                    result.drafted += len(draft)
                result.accepted[one.group.epoch, (place - len(one.group.prompt)) // TOKENS].append(accepted)
            one.place += accepted + 1
        result.seconds += step_s(rows)
        for one in [one for one in active if one.place >= len(one.tokens)]:
            active.remove(one)
            one.index.add(one.tokens)


def drafts_report(run: Path, config: Config, step_ms: str | None) -> Iterator[str]:
    """Yield the lines that `plan --speculation` prints."""
    groups, batch = read_groups(run), config.engine.draft_batch
    draft_tokens = config.engine.draft_tokens or DEFAULT_TOKENS
    stats = decode(groups, together=1, running=batch, batch=batch, max_drafts=draft_tokens, step_s=lambda rows: 0.0)
    total = sum(len(tokens) for group in groups for tokens in group.samples)
    accepted = sum(map(sum, stats.accepted.values()))
    yield (
        f"{len(groups)} groups of {run}, {total:,} tokens, up to {draft_tokens} drafted tokens at any load: "
        f"{accepted / max(1, total):.0%} of the tokens need no step of their own, "
        f"{accepted / max(1, stats.drafted):.0%} of the drafted ones are accepted"
    )
    yield f"accepted tokens of a step, by earlier groups of the prompt and place in the response (of {TOKENS} tokens):"
    for epoch in sorted({epoch for epoch, _ in stats.accepted}):
        places = sorted(place for group_epoch, place in stats.accepted if group_epoch == epoch)
        means = "  ".join(f"{place * TOKENS}: {mean(stats.accepted[epoch, place]):.2f}" for place in places[:8])
        yield f"  {epoch} earlier   {means}"
    if step_ms is None:
        yield "name the engine's step times by --step-ms to predict the gain; benchmarks/speculation.py measures them"
        return
    plain, drafted = gain(groups, config, parse_step_times(step_ms), draft_tokens)
    yield (
        f"decoding a step's samples takes {plain:.1f} s without drafts and {drafted:.1f} s with engine.draft_tokens = "
        f"{draft_tokens} and engine.draft_batch = {batch}: {plain / drafted:.2f} x as fast"
    )


def gain(groups: Sequence[StoredGroup], config: Config, step_s: StepTime, max_drafts: int) -> tuple[float, float]:
    """Return the mean seconds that an engine decodes for a training step: (without drafts, with drafts)."""
    size, engines, engine = config.rollout.prompts_per_step, config.engine.count, config.engine
    together = -(-config.rollout.max_concurrent_groups // engines)
    first = len(groups) % size if len(groups) > size else 0
    steps = [groups[i : i + size][::engines] for i in range(first, len(groups), size)]
    on_engine = partial(decode, together=together, running=engine.max_num_seqs, batch=engine.draft_batch, step_s=step_s)
    plain, drafted = (mean(on_engine(step, max_drafts=m).seconds for step in steps) for m in (0, max_drafts))
    return plain, drafted
