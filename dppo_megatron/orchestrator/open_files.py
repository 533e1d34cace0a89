"""Every request to an engine is a connection, every connection an open file, and their number is limited."""

from __future__ import annotations

from dppo_megatron.common.open_files import raise_limit
from dppo_megatron.config import Config, ConfigError

OTHER_FILES = 256  # bank, logs, reward processes, health checks


def allow_open_files(config: Config) -> None:
    """Raises this process's soft limit to the hard one. Raises `ConfigError` where sampling may need more than that."""
    rollout = config.rollout
    # When an update interrupts all samples, each is continued by a request of its own; evaluations run beside them.
    needed = rollout.max_concurrent_groups * (rollout.group_size + 1) + OTHER_FILES
    if config.environment.source is not None:
        needed += config.environment.workers + 2 * rollout.max_concurrent_groups  # their journals
    limit = raise_limit(needed)
    if needed > limit:
        raise ConfigError(
            f"limit of open files {limit} (ulimit -Hn)",
            [
                f"rollout.max_concurrent_groups = {rollout.max_concurrent_groups} with rollout.group_size = "
                f"{rollout.group_size}: may need {needed} connections and files; raise the limit or lower one of them"
            ],
        )
