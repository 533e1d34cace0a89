"""The rule book: every rule about a config stands once in this folder. `preflight.py` is its page of contents.

A rule file has one subject and a function `problems(config, ...)` that returns lines `setting = value: why; remedy`.
Nothing here imports torch before a rule needs it: the node that drives a Slurm job may have none.
"""

from .preflight import Place, load_config, preflight, settings_problems
from .resume import check_run_dir

__all__ = ["Place", "check_run_dir", "load_config", "preflight", "settings_problems"]
