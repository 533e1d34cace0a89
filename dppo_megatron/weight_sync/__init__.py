"""Publishing the trainer's weights to the engines, confirmed by a probe."""

from .live_engines import WeightSyncError
from .probe import probe_tokens
from .publisher import Published, Publisher

__all__ = ["Published", "Publisher", "WeightSyncError", "probe_tokens"]
