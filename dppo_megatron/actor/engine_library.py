"""The import of TransformerEngine, before Megatron-core's own: an installation that does not load counts as none."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache

_NAME = "transformer_engine"


@cache
def load_problem() -> str:
    """Import TransformerEngine. Return its error if it is installed and does not load, otherwise "".

    Megatron-core catches ImportError only, but without its torch library it raises FileNotFoundError, without CUDA's
    OSError. After any error each later import raises ModuleNotFoundError, so that local layers work.
    """
    if importlib.util.find_spec(_NAME) is None:
        return ""
    try:
        importlib.import_module(f"{_NAME}.pytorch")
    except Exception as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]
        sys.modules[_NAME] = None
        return f"{type(error).__name__}: {error}"
    return ""
