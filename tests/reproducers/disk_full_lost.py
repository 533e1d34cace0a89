"""A full disk during a checkpoint must cross a process as `DiskFull` with its text, and not as a TypeError.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/disk_full_lost.py
"""

import pickle
import sys
import tempfile
from pathlib import Path

from dppo_megatron.common.files import DiskFull, disk_full
from dppo_megatron.hf.errors import ModelError

full = disk_full(Path(tempfile.mkdtemp()) / "weights.bin", OSError(28, "No space left on device"), 1000)
lost = 0
for error in (full, ModelError("model", ["no weights"])):
    print("raised: ", error)
    try:
        arrived = pickle.loads(pickle.dumps(error))
    except TypeError as failure:
        arrived = failure
    print("arrives:", type(arrived).__name__, arrived)
    lost += type(arrived) is not type(error) or str(arrived) != str(error)
sys.exit(bool(lost or not isinstance(full, DiskFull)))
