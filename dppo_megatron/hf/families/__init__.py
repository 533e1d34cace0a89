"""Lists the model families. A new family needs a file in this folder and a line here.

A dense family needs only a line in `dense.py`.
"""

from __future__ import annotations

from .deepseek_v3 import DEEPSEEK_V3
from .dense import DENSE
from .family import Family
from .glm4_moe import GLM4_MOE
from .gpt_oss import GPT_OSS
from .qwen3_5 import QWEN3_5
from .qwen3_moe import QWEN3_MOE

_ALL = (*DENSE, QWEN3_MOE, DEEPSEEK_V3, *GLM4_MOE, *QWEN3_5, GPT_OSS)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}

__all__ = ["FAMILIES", "Family"]
