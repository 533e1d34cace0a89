"""What is wrong with a run, from its metrics and its bank: what, since which step, the evidence and the remedy.

A sign is a function of one step and of what came before it, so a run that is going on and one that ended are judged by
the same code. docs/doctor.md lists the signs.
"""

from .diagnosis import Examination, Finding, diagnose, text

__all__ = ["Examination", "Finding", "diagnose", "text"]
