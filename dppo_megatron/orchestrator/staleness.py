"""The arithmetic of `rollout.max_staleness`: when a group may be begun, and when a finished one may be stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Group number g is trained on in step g // groups_per_step, which is also the policy version it updates."""

    groups_per_step: int
    max_staleness: int

    def needed_version(self, group: int) -> int:
        """The oldest policy that may sample group number `group`."""
        return max(0, group // self.groups_per_step - self.max_staleness)

    def last_step(self, version: int) -> int:
        """The last step that may train on samples of policy `version`."""
        return version + self.max_staleness

    def leaves_room(self, group: int, running: Iterable[int]) -> bool:
        """Whether all of the running groups, given by their last steps, find a place in time after number `group`.

        Without this, groups that sample quickly would overtake slow ones until those are too stale.
        """
        places = enumerate(sorted(running), start=group + 1)
        return all(place // self.groups_per_step <= last for place, last in places)

    def count_too_late(self, group: int, running: Sequence[int], finished: Sequence[int]) -> int:
        """How many of the running groups, given most urgent first, must be given up so that all others, running or
        finished, find a place in time after number `group`."""
        count = 0
        while count < len(running) and not self.leaves_room(group, [*running[count:], *finished]):
            count += 1
        return count
