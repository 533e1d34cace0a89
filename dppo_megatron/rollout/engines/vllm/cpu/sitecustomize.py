"""Let vLLM import Qwen3.5 on a machine without CUDA, because the published torchvision is for the CUDA torch.

Python reads this file at start because the server's PYTHONPATH names this directory (see `../kind.py`).
torchvision becomes a stub, because text models do not call it.
"""

from __future__ import annotations

import sys

from absent_packages import AbsentPackages

sys.meta_path.append(AbsentPackages({"torchvision": None}))  # after the installed packages
