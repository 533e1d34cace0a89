"""Store finished groups in the rollout bank, an append-only, crash-safe directory.

Every rollout reaches the trainer through the bank. The orchestrator has the only `BankWriter`; trainer ranks and tools
use `BankReader`. Opening a writer repairs what a crash cut off (`recovery`); a reader changes no file. Groups are
trained in append order: step s trains on groups [s G, (s + 1) G). docs/bank.md describes the files.
"""

from .earlier import EarlierSamples
from .entry import BankEntry
from .errors import BankCorruption, BankError, BankLocked, BankTimeout, BankWriteError
from .files import ReadBuffer
from .reader import BankReader
from .retention import allow_deletion, retired_segments
from .writer import BankWriter

__all__ = [
    "BankCorruption",
    "BankEntry",
    "BankError",
    "BankLocked",
    "BankReader",
    "BankTimeout",
    "BankWriteError",
    "BankWriter",
    "EarlierSamples",
    "ReadBuffer",
    "allow_deletion",
    "retired_segments",
]
