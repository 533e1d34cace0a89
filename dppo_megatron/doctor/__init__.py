"""Finds problems of a run in its metrics and its bank. A finding has its first step, the evidence and a remedy.

A check reads one step and the numbers of earlier steps, so running and ended runs are examined in the same way.
docs/doctor.md lists the checks.
"""

from .diagnosis import Examination, Finding, diagnose, text

__all__ = ["Examination", "Finding", "diagnose", "text"]
