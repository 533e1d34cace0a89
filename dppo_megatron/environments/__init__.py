"""Turns: environments in worker processes, and trajectories in which the policy and they alternate.

The worker processes import this room, so nothing heavy is imported here; the orchestrator imports `episodes`.
"""

from .interface import Environment, EnvironmentFailed, EnvironmentNameError, Message, StepResult

__all__ = ["Environment", "EnvironmentFailed", "EnvironmentNameError", "Message", "StepResult"]
