"""Run environments in worker processes, and trajectories in which the policy and an environment alternate.

The worker processes import this package, so no heavy module is imported here; the orchestrator imports `episodes`.
"""

from .interface import Environment, EnvironmentFailed, EnvironmentNameError, Message, StepResult

__all__ = ["Environment", "EnvironmentFailed", "EnvironmentNameError", "Message", "StepResult"]
