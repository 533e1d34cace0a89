"""Log-probs of requests kept as the arrays that vLLM's engine core sends.

vLLM's own container spreads every entry over four Python lists, which costs more than choosing the entries.
"""

from __future__ import annotations

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


def columns(found: LogprobRows | FlatLogprobs, positions: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """ids int32 and log-probs fp32, [positions, k + 1]: the sampled token's first. Raises ValueError for others."""
    if isinstance(found, LogprobRows):
        # A step has as many entries as the request of the batch that wants most.
        ids = [part[:, : k + 1] for part, _ in found.parts] or [np.empty((0, k + 1))]
        logprobs = [part[:, : k + 1] for _, part in found.parts] or [np.empty((0, k + 1))]
        ids, logprobs = np.concatenate(ids), np.concatenate(logprobs)
    else:
        ids, logprobs = np.asarray(found.token_ids), np.asarray(found.logprobs)
    shape = (positions, k + 1)
    return ids.astype(np.int32).reshape(shape), logprobs.astype(np.float32).reshape(shape)
