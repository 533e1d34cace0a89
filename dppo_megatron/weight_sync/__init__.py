"""Publishing the trainer's weights to the engines, confirmed by a probe."""

from .probe import probe_tokens
from .publisher import Published, Publisher, WeightSyncError

__all__ = ["Published", "Publisher", "WeightSyncError", "probe_tokens"]
