"""Imported first by the fork server of ranks that have TransformerEngine."""

import sys
from pathlib import Path

from tests.null_gpu.te_extension import install

sys.path.insert(0, str(Path(sys.prefix) / "transformer-engine"))
install()
