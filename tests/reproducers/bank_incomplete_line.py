"""A power failure that keeps only some pages of the last index line must leave a bank that can be opened.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/bank_incomplete_line.py
"""

import shutil
import sys
import tempfile
from pathlib import Path

from dppo_megatron.bank import BankCorruption, BankWriter
from tests.support.bank import as_killed, files, make_group

with tempfile.TemporaryDirectory() as directory:
    bank = Path(directory) / "bank"
    with BankWriter(bank, 64, fsync=True) as writer:
        for position in range(3):
            writer.append(make_group(position, samples=64, longest=200))
    as_killed(bank)
    index = files(bank, 0)[1]
    whole = index.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    refused = False
    print(
        f"the last line has {len(whole) - start} bytes: pages {start // 4096} to {(len(whole) - 1) // 4096} of the file"
    )
    for page in range(start // 4096, (len(whole) - 1) // 4096 + 1):
        begin, end = max(start, page * 4096), min(len(whole), (page + 1) * 4096)
        for what, incomplete in (("zeros", whole[:begin] + bytes(end - begin) + whole[end:]), ("cut", whole[:begin])):
            index.write_bytes(incomplete)
            try:
                with BankWriter(bank, 64, fsync=True) as writer:
                    found = f"opens, {len(writer.done_positions())} groups"
                as_killed(bank)
            except BankCorruption as error:
                refused = True
                found = "REFUSED: " + str(error).replace(str(bank), "BANK")[:150]
            print(f"page {page} of the last line: {what}: {found}")
            bin_, _ = files(bank, 0)
            shutil.rmtree(bank)
            with BankWriter(bank, 64, fsync=True) as writer:
                for position in range(3):
                    writer.append(make_group(position, samples=64, longest=200))
            as_killed(bank)
            whole = index.read_bytes()
    sys.exit(refused)
