"""Publishing the trainer's weights to the engines, verified by the log-probs of a few tokens."""

from .build import build_publisher
from .check_tokens import weight_check_tokens
from .errors import WeightSyncError
from .publisher import Published, Publisher

__all__ = ["Published", "Publisher", "WeightSyncError", "build_publisher", "weight_check_tokens"]
