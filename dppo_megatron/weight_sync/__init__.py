"""Publishing the trainer's weights to the engines, confirmed by a probe."""

from .build import build_publisher
from .check_sequence import probe_tokens
from .errors import WeightSyncError
from .publisher import Published, Publisher

__all__ = ["Published", "Publisher", "WeightSyncError", "build_publisher", "probe_tokens"]
