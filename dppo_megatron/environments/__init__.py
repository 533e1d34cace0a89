"""Turns: environments in worker processes, and trajectories in which the policy and they alternate.

The processes import this room, so nothing heavy is imported here: `episodes` is imported by whoever plays.
"""

from .interface import Environment, EnvironmentFailed, EnvironmentNameError, Message, StepResult

__all__ = ["Environment", "EnvironmentFailed", "EnvironmentNameError", "Message", "StepResult"]
