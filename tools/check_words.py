"""Check the wording: `python tools/check_words.py` prints problems and exits with 1.

- Retired words had a private meaning here. The term to use is next to each. CHANGELOG.md may name them.
- Rates: some words make sentences hard to read when they are frequent ("what is stored is what was sent"). Their number
  per 1,000 words of comments and docstrings, and of documentation pages, is limited to twice the highest rate in six
  well-regarded codebases. `python tools/check_words.py --rates` prints all rates.
- Names: variables, arguments, attributes and functions of the package that are function words or bare participles
  (`found`, `what`, `own`) do not say what they hold. `python tools/check_words.py --names` lists them. Names of tests
  contain no word such as "what", "alone" or "said".
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
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

# Word: pattern, most per 1,000 words of code comments and docstrings, and of documentation.
RATES = {
    "what": (r"what", 1.2, 2.6),
    "alone": (r"alone", 0.4, 0.4),
    "whose": (r"whose", 0.4, 0.4),
    "nobody, somebody, whoever": (r"nobody|somebody|whoever", 0.14, 0.14),
    "says": (r"says", 0.14, 0.14),
    "of it": (r"of it", 0.2, 0.2),
    "beside": (r"beside", 0.0, 0.0),
    "those that": (r"those that", 0.0, 0.0),
    "lie, lies": (r"lies?", 0.0, 0.0),
    "anew": (r"anew", 0.0, 0.0),
    "of the": (r"of the", 5.0, 5.0),
    "its": (r"its", 3.0, 4.0),
    "one": (r"one", 4.0, 6.0),
    "those of, that of": (r"th(?:ose|at) of", 0.0, 0.3),
}
# Words that name nothing by themselves. Nouns that are common names (`first`, `last`, `new`, `old`) are not among them.
VAGUE = re.compile(
    r"_?(of_.*|(?:"
    r"above|after|again|all|asked|awake|away|before|begun|behind|beyond|both|broken|called|chosen|compared|drawn|"
    r"each|few|found|given|had|held|here|how|kept|known|least|listed|made|many|measured|more|most|of|others|over|"
    r"own|planned|played|read|said|seen|some|still|such|taken|taught|that|then|there|this|told|untaught|used|"
    r"wanted|what|why"
    r"))_?"
)
VERBS = {"read"}  # names of functions all the same
MAX_VAGUE = 0.2  # per 1,000 lines with code
UNCLEAR_TEST = re.compile(r"test_(?:.*_)?(?:what|alone|whose|nobody|somebody|says|said|told|beside|anew)(?:_.*)?")

COUNTED = {word: re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE) for word, (pattern, *_) in RATES.items()}


def find_words(text: str) -> list[tuple[int, str, str]]:
    """Return line number, word, and better word for every retired word."""
    lines = enumerate(text.splitlines(), 1)
    return [(n, m[0], word) for n, line in lines for pattern, word in PATTERNS for m in pattern.finditer(line)]


def comments(source: str) -> str:
    """Return the comments and docstrings of Python source."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found += [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return "\n".join(found)


def prose(root: Path) -> dict[str, str]:
    """Return the text of each part: "code" of the package, and "docs" without code blocks."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    texts = (re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S) for page in pages if page.exists())
    sources = sorted((root / "dppo_megatron").rglob("*.py"))
    return {"code": "\n".join(comments(file.read_text()) for file in sources), "docs": "\n".join(texts)}


def rates(text: str) -> dict[str, float]:
    """Return the occurrences per 1,000 words."""
    words = max(1, len(re.findall(r"[A-Za-z']+", text)))
    return {word: 1000 * len(pattern.findall(text)) / words for word, pattern in COUNTED.items()}


def above_limit(parts: dict[str, str]) -> Iterator[str]:
    for part, text in parts.items():
        for word, rate in rates(text).items():
            limit = RATES[word][1 if part == "code" else 2]
            if rate > limit:
                yield f"{part}: {word!r} {rate:.2f} times in 1,000 words, at most {limit}; write plainer sentences"


def vague_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and name of every variable, argument, attribute and function with a vague name."""
    for node in ast.walk(ast.parse(source)):
        name = ""
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") not in VERBS:
            name = node.name
        if VAGUE.fullmatch(name):
            yield node.lineno, name


def unclear_tests(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and name of every test function that `UNCLEAR_TEST` matches."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and UNCLEAR_TEST.fullmatch(node.name):
            yield node.lineno, node.name


def names_above_limit(root: Path) -> Iterator[str]:
    sources = [file.read_text() for file in sorted((root / "dppo_megatron").rglob("*.py"))]
    lines = sum(bool(line.strip()) for source in sources for line in source.splitlines())
    rate = 1000 * sum(len(list(vague_names(source))) for source in sources) / max(1, lines)
    if rate > MAX_VAGUE:
        yield f"names: {rate:.1f} vague ones in 1,000 lines, at most {MAX_VAGUE}; `--names` lists them"


def main(root: Path) -> int:
    files = [*root.iterdir(), *(file for folder in FOLDERS for file in (root / folder).rglob("*"))]
    found = []
    for file in sorted(file for file in files if file.is_file() and file.name.endswith(SUFFIXES)):
        name = file.relative_to(root).as_posix()
        if name not in EXEMPT:
            found += [f"{name}: {word!r} in its name, write: {better}" for _, word, better in find_words(name)]
            found += [f"{name}:{n}: {word!r}, write: {better}" for n, word, better in find_words(file.read_text())]
        if name.startswith("tests/") and name.endswith(".py"):
            found += [
                f"{name}:{n}: {test}: name the object and the verb" for n, test in unclear_tests(file.read_text())
            ]
    found += [*above_limit(prose(root)), *names_above_limit(root)]
    print("\n".join(found) or "words: no retired ones, none too frequent")
    return 1 if found else 0


def print_rates(root: Path) -> None:
    for part, text in prose(root).items():
        print(part, ", ".join(f"{word} {rate:.2f}" for word, rate in rates(text).items()))


def print_names(root: Path) -> None:
    for file in sorted((root / "dppo_megatron").rglob("*.py")):
        for line, name in vague_names(file.read_text()):
            print(f"{file.relative_to(root)}:{line}: {name}")


if __name__ == "__main__":
    ROOT = Path(__file__).parents[1]
    if "--rates" in sys.argv:
        print_rates(ROOT)
    elif "--names" in sys.argv:
        print_names(ROOT)
    else:
        sys.exit(main(ROOT))
