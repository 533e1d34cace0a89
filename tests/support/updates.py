"""The report of an optimizer update, made without an actor."""

from typing import Any

from dppo_megatron.train.actor import UpdateStats


def update_stats(**changes: Any) -> UpdateStats:
    """An update of six tokens that all carry loss."""
    values: dict[str, Any] = dict.fromkeys(("loss", "grad_norm", "lr", "forward_backward_s", "optimizer_s"), 0.0)
    values |= {"tokens": 6, "loss_tokens": 6, "nonfinite_tokens": 0, "metrics": {}, "parts": {}, "masked": {}}
    values |= {"skipped": False, "overflowed": False, "skipped_in_a_row": 0, "loss_scale": None}
    return UpdateStats(**values | changes)
