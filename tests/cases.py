"""List every test case with its markers, and compare the list with that of an earlier commit.

With --before REF it fails if a case of REF has neither a namesake nor a successor. `OLD -> NEW` of successors.txt names
the case that replaces another. Each * of OLD stands for any text, which takes the place of the * of NEW in that order.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()


class Cases:
    """A plugin that keeps the collected cases: node id -> markers."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in session.items}
        self.found = {case: ",".join(sorted(marks - {"parametrize", "timeout"})) for case, marks in names.items()}


def of_this_checkout() -> dict[str, str]:
    plugin = Cases()
    with contextlib.redirect_stdout(sys.stderr):
        assert pytest.main(["tests", "-m", "", "--collect-only", "-qq"], [plugin]) == 0, (
            "not all cases can be collected"
        )
    return plugin.found


def of_commit(reference: str) -> dict[str, str]:
    """Collect the cases of a commit in a worktree of it."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, reference], cwd=HERE.parent, check=True)
        try:
            variables = os.environ | {"PYTHONPATH": str(tree)}
            text = subprocess.check_output([sys.executable, "-P", HERE], cwd=tree, env=variables, text=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=HERE.parent, check=True)
    return dict(line.split("\t") for line in text.splitlines())


def unnumbered(case: str) -> str:
    """Return the case without the numbers that pytest gives to parameters, which change when one is added before."""
    return re.sub(r"(?<=[\[-])([a-z_]+)\d+(?=-)", r"\1", case)


def successors(case: str, table: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the case by each matching line of `table`, and its successors in turn, because a case may move twice."""
    for old, new in table:
        if match := re.fullmatch(re.escape(old).replace(r"\*", "(.*)"), case, re.DOTALL):
            first, *others = new.split("*")
            after = first + "".join(map("".join, zip(match.groups(), others, strict=False)))
            yield after
            yield from successors(after, table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", metavar="REF")
    reference, now = parser.parse_args().before, of_this_checkout()
    if reference is None:
        print("\n".join(f"{case}\t{marks}" for case, marks in now.items()))
        return 0
    lines = (line for line in (HERE.parent / "successors.txt").read_text().splitlines() if " -> " in line)
    table = [tuple(line.split(" -> ")) for line in lines]
    before, replaced, lost = of_commit(reference), 0, []
    added = Counter(map(unnumbered, now.keys() - before.keys()))
    for case in before.keys() - now.keys():
        names = (case, *successors(case, table))
        after = next((n for n in names if n in now or added[unnumbered(n)] > 0), None)
        if after is None:
            lost.append(case)
        else:
            replaced += 1
            added[unnumbered(after)] -= after not in now  # a case that only its number tells apart replaces one
    print(f"{len(before)} cases before, {len(now)} now; {replaced} have a successor, {len(lost)} have none")
    print("".join(f"without a successor: {case}\n" for case in sorted(lost)), end="")
    return len(lost) > 0


if __name__ == "__main__":
    sys.exit(main())
