"""Which tests share a process, and which of the slow tests a submission runs.

A submission runs the tests of `make test`, the cases marked `smoke` (one of every kind of slow test), and one of three
shards of the other slow tests. `schedule.txt` has the seconds of each unit, and the units are dealt so that the shards
take equally long. After a run with `RESULTS=DIRECTORY CI_SHARD=all .ci/run`, rewrite it:

    python -m tests.schedule DIRECTORY
"""

import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from xml.etree import ElementTree
from zlib import crc32

SHARDS = 3
SECONDS = Path(__file__).with_name("schedule.txt")
# Folders whose files start what others of the folder do not use.
BY_FILE = ("e2e", "parallel", "attack", "engines", "weight_sync", "null_gpu")


def group(nodeid: str) -> str:
    """Tests of one group run in one process: those of a folder or file, of the engines' contract those of a server.

    The faults of SGLang's server use no server of the other faults.
    """
    file, folder, name = _unit(nodeid)
    if folder == "faults" and "sglang" in nodeid:
        return "faults sglang"
    return name if name != file or folder in BY_FILE else folder


def shard(nodeid: str) -> int:
    """Shard of a slow test. Tests of a file, or of one server of the engines' contract, are in one shard."""
    name = _unit(nodeid)[2]
    return _dealt().get(name, crc32(name.encode()) % SHARDS)


def _unit(nodeid: str) -> tuple[str, str, str]:
    """Return the test's file, its folder, and its unit: the file, or the server of the engines' contract."""
    file, _, test = nodeid.partition("::")
    folder = file.split("/")[-2]
    server = re.search(r"(vllm|sglang)-(dense|moe)", test) if folder == "engines" else None
    return file, folder, server[0] if server else file


@cache
def _dealt() -> dict[str, int]:
    """Deal the longest unit first, each to the shard with the fewest seconds."""
    lines = (line.split() for line in SECONDS.read_text().splitlines() if not line.startswith("#"))
    seconds = {name: float(value) for value, name in lines}
    sums, dealt = [0.0] * SHARDS, {}
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        dealt[name] = sums.index(min(sums))
        sums[dealt[name]] += seconds[name]
    return dealt


def main(results: Path) -> None:
    """Write the seconds of every unit with more than one, from the JUnit files of `results`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for file in results.glob("*.xml"):
        for case in ElementTree.parse(file).iter("testcase"):
            if case.get("classname"):
                nodeid = case.get("classname", "").replace(".", "/") + f".py::{case.get('name')}"
                seconds[_unit(nodeid)[2]] += float(case.get("time", 0))
    lines = [f"{value:.0f} {name}\n" for name, value in sorted(seconds.items()) if value >= 1]
    SECONDS.write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
