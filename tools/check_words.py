"""Find words that this project no longer uses: `python tools/check_words.py` prints the places and exits with 1.

Each had a private meaning here and has no other in this code; the field's word is named beside it. CHANGELOG.md may
name them, for it tells what was renamed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WORDS = {
    r"spoilt": "invalid",
    r"(?<![a-z])lent(?![a-z])": "offloaded",
    r"(?<![a-z])vouch(es|ed|ing)?(?![a-z])": "verified",
    r"patience|patiently": "timeout, retry budget",
    r"(?<![a-z])call(s|ed|ing)?[_ ]off(?![a-z])": "abort",
    r"(?<![a-z])played_": "fake_",
    r"(?<![a-z])torn(?![a-z])": "inconsistent, incomplete",
}
EXEMPT = ("CHANGELOG.md", "tools/check_words.py")
FOLDERS = ("dppo_megatron", "tests", "docs", "examples", "benchmarks", "tools", "slurm", "requirements")
SUFFIXES = (".py", ".md", ".yaml", ".toml", ".lock", ".sbatch", ".sh", ".j2", ".svg", "Makefile")
PATTERNS = [(re.compile(pattern, re.IGNORECASE), word) for pattern, word in WORDS.items()]


def find_words(text: str) -> list[tuple[int, str, str]]:
    """Line number, the word found, what to write."""
    lines = enumerate(text.splitlines(), 1)
    return [(n, m[0], word) for n, line in lines for pattern, word in PATTERNS for m in pattern.finditer(line)]


def main(root: Path) -> int:
    files = [*root.iterdir(), *(file for folder in FOLDERS for file in (root / folder).rglob("*"))]
    found = []
    for file in sorted(file for file in files if file.is_file() and file.name.endswith(SUFFIXES)):
        name = file.relative_to(root).as_posix()
        if name not in EXEMPT:
            found += [f"{name}: {word!r} in its name, write: {better}" for _, word, better in find_words(name)]
            found += [f"{name}:{n}: {word!r}, write: {better}" for n, word, better in find_words(file.read_text())]
    print("\n".join(found) or "words: none of the retired ones")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
