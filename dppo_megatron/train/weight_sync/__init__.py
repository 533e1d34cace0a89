"""Publish the trainer's weights to the engines, and verify them by the log-probs of a few tokens."""

from .build import build_publisher, weight_check_tokens
from .publisher import Publisher, PublishResult
from .transport import WeightSyncError

__all__ = ["PublishResult", "Publisher", "WeightSyncError", "build_publisher", "weight_check_tokens"]
