"""The limit of open files of this process; a shell's is often 1024."""

from __future__ import annotations

import resource


def raise_limit(wanted: int) -> int:
    """Raises the soft limit to the hard one, or to `wanted` where there is none; returns what it could be raised to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    return limit
