"""Log-probs of requests kept as the arrays that vLLM's engine core sends.

vLLM's own container spreads every entry over four Python lists, which costs more than choosing the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.outputs import LogprobsLists


class LogprobRows:
    """The sampled token and the most likely ones of each position, in the order of sampling."""

    def __init__(self):
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []  # ids and log-probs of a step, [positions, entries]

    def __len__(self) -> int:
        return sum(len(ids) for ids, _ in self.parts)


@dataclass
class RowsProcessor(LogprobsProcessor):
    """Takes the place of the `LogprobsProcessor` of one request that has sampled nothing yet."""

    def _update_sample_logprobs(self, logprobs_lists: LogprobsLists) -> None:
        ids, logprobs, *_ = logprobs_lists
        self.logprobs.parts.append((ids, logprobs))


def keep_rows(state: RequestState) -> None:
    """From now on keeps rows for a request that has sampled nothing yet.

    For speed alone: where vLLM keeps log-probs in another way, they stay as they are.
    """
    own = state.logprobs_processor
    if type(own) is LogprobsProcessor and isinstance(own.logprobs, FlatLogprobs) and not len(own.logprobs):
        state.logprobs_processor = RowsProcessor(**vars(own) | {"logprobs": LogprobRows()})


def columns(
    found: Sequence[LogprobRows | FlatLogprobs], positions: Sequence[int], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """ids int32 and log-probs fp32, [positions of all samples, k + 1]: the sampled token's first.

    positions: of each sample; raises ValueError where it has others.
    """
    if (held := list(map(len, found))) != list(positions):
        raise ValueError(f"log-probs of {held} positions, expected {list(positions)}")
    pieces = [piece for each in found for piece in _pieces(each, k + 1)] or [(np.empty((0, k + 1)),) * 2]
    ids, logprobs = (np.concatenate(of_all) for of_all in zip(*pieces, strict=True))
    return ids.astype(np.int32), logprobs.astype(np.float32)


def _pieces(found: LogprobRows | FlatLogprobs, entries: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """ids and log-probs [positions, entries] of some positions each."""
    if isinstance(found, LogprobRows):
        # A step has as many entries as the request of the batch that wants most.
        return [(ids[:, :entries], logprobs[:, :entries]) for ids, logprobs in found.parts]
    shape = (len(found), entries)
    return [(np.asarray(found.token_ids).reshape(shape), np.asarray(found.logprobs).reshape(shape))]
