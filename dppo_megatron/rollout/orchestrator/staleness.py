"""Apply `rollout.max_staleness`: it decides when a group may begin and when a finished group may be stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Bounds the staleness. Group g is trained on in step s = g // groups_per_step, which updates version s.

    Example: with 4 groups per step and max_staleness 1, group 9 (step 2) needs a policy of version 1 or newer.
    """

    groups_per_step: int
    max_staleness: int

    def needed_version(self, group: int) -> int:
        """Return the oldest policy that may sample group number `group`."""
        return max(0, group // self.groups_per_step - self.max_staleness)

    def last_step(self, version: int) -> int:
        """Return the last step that may train on samples of policy `version`."""
        return version + self.max_staleness

    def leaves_room(self, group: int, running: Iterable[int]) -> bool:
        """Return whether all running groups, given by their last steps, can be stored in time after number `group`.

        Without this check, fast groups would overtake slow ones until those are too stale.
        """
        places = enumerate(sorted(running), start=group + 1)
        return all(place // self.groups_per_step <= last for place, last in places)

    def count_too_late(self, group: int, running: Sequence[int], finished: Sequence[int]) -> int:
        """Return how many of the running groups, given most urgent first, must be given up.

        All other groups, running or finished, can then be stored in time after number `group`.
        """
        count = 0
        while count < len(running) and not self.leaves_room(group, [*running[count:], *finished]):
            count += 1
        return count
