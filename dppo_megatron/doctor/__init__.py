"""Finds problems of a run in its metrics and its bank, each with its first step, the evidence and a remedy.

A check reads one step and the numbers of the steps before, so a running and an ended run are examined alike.
docs/doctor.md lists the checks.
"""

from .diagnosis import Examination, Finding, diagnose, text

__all__ = ["Examination", "Finding", "diagnose", "text"]
