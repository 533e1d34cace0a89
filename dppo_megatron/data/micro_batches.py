"""Decide, from the lengths only, which sequences are computed together and on which rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Plan = list[list[list[int]]]  # [rank][micro-batch] -> ascending indices of sequences


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Describes the common prefixes of N sequences; sequences in a group are adjacent.

    Example: groups [0, 0, 1] and lengths [5, 5, 3]: sequences 0 and 1 begin with the same 5 tokens.
    """

    groups: np.ndarray  # [N] int, group of each sequence
    lengths: np.ndarray  # [N] int, tokens of the common prefix, fewer than the sequence has


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray, data_parallel: int, budget: int, prefixes: Prefixes | None = None
) -> Plan:
    """Split sequences of the given lengths over ranks and micro-batches.

    lengths: tokens per sequence.
    budget: most tokens per micro-batch; a longer sequence gets a separate micro-batch.
    prefixes: a micro-batch computes a prefix once for all sequences in the group.

    Returns `plan[rank][micro_batch]` -> ascending indices into `lengths`. Every index occurs once. All ranks have
    equally many micro-batches, at least one, some possibly empty. Token counts differ between ranks by at most the
    longest sequence, or the largest part of a group that is kept together. The largest micro-batches come first, so
    that a lack of memory shows at once. Example: lengths [4, 3, 2, 1], 2 ranks and budget 5 give [[[0, 3]], [[1, 2]]].

    With prefixes, four plans are compared: groups split into parts of at most the budget, half the budget or a quarter,
    or into single sequences. The plan in which ranks wait least for the slowest rank is chosen.

    Equal arguments give equal plans. Raises `ValueError` for lengths, ranks or a budget below 1.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if data_parallel < 1 or budget < 1 or (len(sizes) and sizes.min() < 1):
        raise ValueError(f"lengths, data_parallel = {data_parallel} and budget = {budget} must all be at least 1")
    if prefixes is None:
        return _plan(sizes, data_parallel, budget)
    plans = []
    for part_budget in (budget, budget // 2, budget // 4, 0):
        parts, rows = _parts(sizes, prefixes, part_budget)
        part_plan = _plan(rows, data_parallel, budget)
        plans.append([[[i for part in batch for i in parts[part]] for batch in rank] for rank in part_plan])
    return min(plans, key=lambda plan: _longest(plan, sizes, prefixes))


def computed_rows(indices: Sequence[int], sizes: np.ndarray, prefixes: Prefixes | None) -> int:
    """Return how many rows a micro-batch of these sequences computes. sizes: [N], tokens of all sequences."""
    rows = int(sizes[indices].sum())
    if prefixes is not None and len(indices):
        groups = prefixes.groups[indices]
        shares_prefix = groups[1:] == groups[:-1]
        rows -= int(prefixes.lengths[indices][1:][shares_prefix].sum())
    return rows


def computed_pairs(plan: Plan, sizes: np.ndarray, prefixes: Prefixes | None) -> int:
    """Return how many (query, key) pairs causal attention computes in `plan`, over the rows in `computed_rows`."""
    if prefixes is not None:
        prefixes = Prefixes(prefixes.groups, _triangle(prefixes.lengths))
    pairs = _triangle(sizes)
    return sum(computed_rows(batch, pairs, prefixes) for rank_batches in plan for batch in rank_batches)


def _triangle(sizes: np.ndarray) -> np.ndarray:
    return sizes.astype(np.int64) * (sizes + 1) // 2


def _longest(plan: Plan, sizes: np.ndarray, prefixes: Prefixes) -> int:
    """Sum, over the micro-batches, the most rows that any rank computes: the others wait for that rank."""
    return sum(
        max(computed_rows(batch, sizes, prefixes) for batch in parallel_batches)
        for parallel_batches in zip(*plan, strict=True)
    )


def _parts(sizes: np.ndarray, prefixes: Prefixes, part_budget: int) -> tuple[list[list[int]], np.ndarray]:
    """Split groups into parts of at most `part_budget` rows, or a single sequence; return (parts, rows per part)."""
    parts: list[list[int]] = []
    rows: list[int] = []
    columns = zip(prefixes.groups.tolist(), sizes.tolist(), prefixes.lengths.tolist(), strict=True)
    last = None
    for index, (group, size, prefix) in enumerate(columns):
        if group == last and rows[-1] + size - prefix <= part_budget:
            parts[-1].append(index)
            rows[-1] += size - prefix
        else:
            parts.append([index])
            rows.append(size)
        last = group
    return parts, np.array(rows, dtype=np.int64)


def _plan(sizes: np.ndarray, data_parallel: int, budget: int) -> Plan:
    order = np.argsort(-sizes, kind="stable")
    ordered = sizes[order].tolist()
    bins = _fewest_bins(ordered, data_parallel, budget)
    totals = [sum(ordered[i] for i in members) for members in bins]
    bin_order = sorted(range(len(bins)), key=lambda b: (-totals[b], b))
    plan: Plan = [[] for _ in range(data_parallel)]
    loads = [0] * data_parallel
    for start in range(0, len(bins), data_parallel):
        # Every rank gets one of each round's near-equal bins; the least loaded rank gets the largest.
        ranks = sorted(range(data_parallel), key=lambda rank: (loads[rank], rank))
        for rank, b in zip(ranks, bin_order[start : start + data_parallel], strict=True):
            plan[rank].append(sorted(order[bins[b]].tolist()))
            loads[rank] += totals[b]
    return plan


def _fewest_bins(ordered: list[int], multiple: int, budget: int) -> list[list[int]]:
    """Pack `ordered` (descending) into the fewest sufficient bins, a multiple of `multiple`; return indices per bin."""
    filled = sum(min(size, budget) for size in ordered)
    needed = max(math.ceil(filled / budget), sum(size > budget / 2 for size in ordered), 1)
    low, high = math.ceil(needed / multiple), math.ceil(max(len(ordered), 1) / multiple)
    if (bins := _fill(ordered, low * multiple, budget)) is not None:
        return bins
    low += 1
    best: list[list[int]] | None = None
    step = 1  # search from below, where the result nearly always is: doubling, then bisection
    while low < high:
        middle = min(low + step - 1, (low + high) // 2)
        if (bins := _fill(ordered, middle * multiple, budget)) is not None:
            best, high, step = bins, middle, high
        else:
            low, step = middle + 1, 2 * step
    # The filling cannot fail with a bin for every sequence.
    return best or _fill(ordered, high * multiple, budget) or []


def _fill(ordered: list[int], count: int, budget: int) -> list[list[int]] | None:
    """Fill bins, longest first, each into the emptiest bin; return None if a sequence does not fit there."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for index, size in enumerate(ordered):
        load, b = heap[0]
        if load and load + size > budget:
            return None
        bins[b].append(index)
        heapq.heapreplace(heap, (load + size, b))
    return bins
