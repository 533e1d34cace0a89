"""Finds problems of a run in the metrics and the bank. A finding has the first step, the evidence and a remedy.

A check reads one step and numbers kept from earlier steps, so running and ended runs are examined alike.
docs/doctor.md lists the checks.
"""

from .diagnosis import Examination, Finding, diagnose, text

__all__ = ["Examination", "Finding", "diagnose", "text"]
