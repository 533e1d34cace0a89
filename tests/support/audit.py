"""Compares the turns in a bank with the turns that engines returned."""

from collections.abc import Iterable, Mapping

import numpy as np

from dppo_megatron.bank.audit import Audit, Turn, name_of
from dppo_megatron.types import Rollout, RolloutGroup, split_columns


def audit(groups: Iterable[RolloutGroup], sampled: Mapping[Turn, Rollout] | None = None) -> Audit:
    """Check that each turn is in one policy span of the trajectory and is inherited exactly as it was sampled.

    A bank by itself reveals only internal contradictions. `sampled` has every turn as the engine returned it, if the
    run recorded that. Then tokens and all columns except the routes are compared bit for bit, and no turn may be
    missing.
    """
    result = Audit()
    left = set(sampled or ())
    for group in groups:
        found = result.add(group)
        if sampled is None:
            continue
        left -= set(found)
        for turn, rollout in found.items():
            if turn not in sampled:
                result.problems.append(f"{name_of(turn)}: a policy span that was never sampled")
            elif differing := _differing(rollout, sampled[turn]):
                result.problems.append(f"{name_of(turn)}: {', '.join(differing)} differ from what was sampled")
    result.problems += [f"{name_of(turn)}: sampled, but in no policy span" for turn in sorted(left)]
    return result


def _differing(found: Rollout, sampled: Rollout) -> list[str]:
    """Return the names of a turn's columns that differ from the sampled turn. Routes are not compared."""
    ours, theirs = ({"token_ids": r.token_ids, **split_columns(r.columns, [len(r.versions)], None)[0]}
                    for r in (found, sampled))  # fmt: skip
    return [
        name
        for name in {**ours, **theirs}
        if name not in ours or name not in theirs or not np.array_equal(ours[name], theirs[name])
    ]
