"""Computes per-token statistics from a vocabulary shard of the logits, with exact gradients.

Depends only on torch. `docs/vocab_parallel.md` shows how to use it from another framework.
"""

from .batch_invariant import batch_invariant_logits
from .checks import DeferredChecks
from .linear import linear_token_statistics
from .statistics import TokenStatistics
from .stored import token_statistics

__all__ = ["DeferredChecks", "TokenStatistics", "batch_invariant_logits", "linear_token_statistics", "token_statistics"]
