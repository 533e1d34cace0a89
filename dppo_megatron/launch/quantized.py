"""The model that engines start with: a quantised copy is made once for a run."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import Config
from dppo_megatron.convert.job import Worker, convert
from dppo_megatron.convert.to_hf import ToHF
from dppo_megatron.engines.serving import start_model
from dppo_megatron.errors import ExpectedError

log = logging.getLogger(__name__)

POLL_S = 0.2


class StartModelTimeout(ExpectedError, TimeoutError):
    """The quantised model was not made in time."""


def ensure_start_model(config: Config, index: int) -> Path:
    """Directory that engine `index` starts with. Where it is a quantised copy, engine 0 makes it and the others wait.

    A copy that was interrupted is continued. Raises `ModelError` as `convert` does, and `StartModelTimeout` when engine
    0 did not make it within `engine.start_timeout_s`.
    """
    directory = start_model(config)
    if directory == config.model.path or directory.exists():
        return directory
    if index == 0:
        quantization = config.engine.quantization
        log.info("quantising %s to %s (engine.quantization = %s)", config.model.path, directory, quantization)
        build = partial(ToHF, config.model.path, directory, config.model.path, quantization=quantization)
        convert(build, resume=True, worker=Worker())
        return directory
    if not wait_until(directory.exists, config.engine.start_timeout_s, POLL_S):
        raise StartModelTimeout(
            f"engine-0 did not quantise {config.model.path} to {directory} within "
            f"{config.engine.start_timeout_s:.0f} s (engine.start_timeout_s); see its log"
        )
    return directory
