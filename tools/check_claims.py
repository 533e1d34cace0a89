"""Compare claims about runs in README.md and docs/ with benchmarks/results: `python tools/check_claims.py`.

It exits with 1 if a results file contradicts a claim. `make docs-check` runs it. The parts of a page are paragraphs,
entries of lists and tables.

- Numbers: a part that names results files, or the date or the GPU of some, and the following parts of its section have
  only numbers of these files, rounded. `OTHER` lists the exceptions, each with its reason.
- "has (not) run": a sentence about a GPU names parts of `make test-gpu`, or subjects of them (`SUBJECTS`). If it denies
  a run, no file may have the part's result. Otherwise a file must have it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tables import ROOT, gpu_results

NUMBER = re.compile(r"(?<![\w.-])(?:\d[\d,]*)?\.?\d+(?:e-?\d+)?(?![\w.]*\w)")
IN_FILES = re.compile(r"(?:\d[\d,]*)?\.?\d+(?:e-?\d+)?")  # also of 120M-64 and 80GB
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
GENERATED = re.compile(r"^```.*?^```$|<!-- (layouts|gpu parts) -->.*?<!-- end of \1 -->", re.MULTILINE | re.DOTALL)
GPU = re.compile(r"\bon (?:the|an|one) (H100|H200|A100|B200)\b")
DENIED = re.compile(r"(?i)\b(?:not|never)(?: yet)?(?: been)? (?:run|ran)\b|\b(?:no|none of) (?:\w+ )+has\b|\bnot yet:")
STATED = re.compile(r"\b(?:ran|(?:has|have)(?: been)? run|(?:was|were) measured)\b(?!.*on (?:a|the) CPU)")
UNIT = re.compile(r"(?:(?:,| and| to| or) [\d.,]+)* ([kMGT]i?B|%)")
ON_GPUS = re.compile(r"GPU|H100|H200|CUDA|NCCL")
SUBJECTS = {  # words of a sentence -> parts of `make test-gpu`
    r"several GPUs|NCCL": ("tp2", "cp2", "ep2", "dp2", "pp2", "mesh", "broadcast", "vllm_tp2"),
    r"[Cc]olocat": ("colocated",),
    r"\bengines?\b|vLLM": ("colocated", "vllm_tp2"),
    r"[Cc]ontext parallel": ("cp2", "mesh"),
    r"[Ee]xpert parallel": ("ep2", "mesh"),
    r"[Pp]ipeline parallel": ("pp2",),
    r"[Tt]ensor parallel": ("tp2", "mesh"),
    r"Triton kernels": ("statistics", "correctness"),
    r"optimizer\.offload": ("offload",),
    r"saves? and loads?|[Cc]heckpoints\b": ("checkpoint",),
    r"dense and MoE|a MoE model": ("moe",),
}
OTHER = {  # page -> why -> numbers that no results file has
    "asynchronous.md": {"1 - 0.89, two figures": "11"},
    "certify.md": {"a width of the model": "448", "the largest of several figures": "1.9e-6"},
    "data.md": {"an example": "2024-02-29"},
    "distillation.md": {"sizes of formats": "8 60"},
    "gpu_day.md": {"predictions of plan": "22.31 13.72", "settings": "32,768", "of other figures": "0.27 10,000"},
    "install.md": {"the date of an installation": "2026-11-24", "files of an environment": "90,000"},
    "lora.md": {"settings and bits": "8 512 1,024 64"},
    "plan.md": {"predictions of plan": "22.31 13.72"},
    "precision.md": {"ratios of figures": "67 283"},
    "scale.md": {"bytes per step": "6.2", "CPU of figures": "22", "settings": "32"},
    "speed.md": {
        "ratios of figures": "0.34 0.38 0.52 30",
        "sizes": "400 16",
        "runs without a file": "0.23 0.62 1.07 1.08 0.42",
    },
    "tested.md": {"the name of a model": "4.6"},
    "vocab_parallel.md": {"an earlier run without a file": "6.9"},
    "weight_sync.md": {"a difference of figures": "1.4", "a limit of the code": "80"},
}


def main(root: Path) -> int:
    found = [f"{page.relative_to(root)}: {problem}" for page in pages(root) for problem in check_page(root, page)]
    print("\n".join(found) or "docs: no results file contradicts a claim about a run")
    return 1 if found else 0


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def check_page(root: Path, page: Path) -> Iterator[str]:
    scope: list[Path] = []
    other = {number for numbers in OTHER.get(page.name, {}).values() for number in numbers.split()}
    for part in _parts(page.read_text()):
        if part.startswith("#"):
            scope = []
        named = _files(root, part)
        yield from (
            f"{date}: no results file has this date" for date in _dates(part) if date not in other and not named
        )
        scope = named or scope
        yield from _numbers(part, scope, other)
        yield from _runs(root, part)


def _parts(text: str) -> list[str]:
    """Return the parts of a page without code blocks and generated tables."""
    return re.split(r"\n\n|\n(?=[-*] |#)", GENERATED.sub("", text))


def _files(root: Path, part: str) -> list[Path]:
    """Return the results files that a part names, or else those of its dates and its GPU."""
    files = sorted((root / "benchmarks" / "results").glob("*.txt"))
    if named := [file for file in files if file.name in part]:
        return named
    dates, gpu = _dates(part), GPU.search(part)
    if gpu:
        files = [file for file in files if f"-{gpu[1].lower()}-" in file.name]
    elif not dates:
        return []
    return [file for file in files if not dates or file.name[:10] in dates]


def _dates(part: str) -> list[str]:
    return DATE.findall(re.sub(r"\]\([^)]*\)|`[^`]*`|<!--.*?-->", "", part))


@cache
def _values(file: Path) -> tuple[float, ...]:
    return tuple(_value(number) for number in IN_FILES.findall(file.read_text()))


def _numbers(part: str, scope: list[Path], other: set[str]) -> Iterator[str]:
    """Yield the numbers of a part that round no number of the files, in the same or the next larger unit."""
    if not scope:
        return
    bare = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|arXiv \S+", "", DATE.sub("", part))
    for match in NUMBER.finditer(bare):
        number, unit = match[0], UNIT.match(bare, match.end())
        scales = (1.0,) if unit is None else (1.0, 100.0) if unit[1] == "%" else (1.0, 1e-3, 1e-6, 1e-9, 1e3)
        values = (scale * value for file in scope for value in _values(file) for scale in scales)
        if number in other or any(abs(value - _value(number)) <= _half_a_digit(number) for value in values):
            continue
        if not any(re.search(rf"(?<![\d.]){re.escape(number)}\.\d", file.read_text()) for file in scope):  # a version
            yield f"{number}: nothing in {', '.join(file.name for file in scope)} rounds to it"


def _runs(root: Path, part: str) -> Iterator[str]:
    ran = {one.part: one for one in gpu_results(root) if one.result == "ok"}
    for sentence in _sentences(re.sub(r"\]\([^)]*\)", "]", part)):
        denied, stated = DENIED.search(sentence), STATED.search(sentence)
        if not ON_GPUS.search(sentence) or not (denied or stated):
            continue
        parts = set(re.findall(r"`(\w+)`", sentence)) & _names()
        parts.update(*(of for words, of in SUBJECTS.items() if re.search(words, sentence)))
        shown = sentence.strip()[:80]
        if denied:
            yield from (f"{shown}: {ran[name].file} has a result of {name}" for name in sorted(parts & ran.keys()))
        elif parts and not parts & ran.keys():
            yield f"{shown}: no results file has a result of {', '.join(sorted(parts))}"


def _sentences(part: str) -> list[str]:
    """Return the sentences of a part, or the rows of a table."""
    lines = part.strip().splitlines()
    if lines and all(line.startswith(("|", "<!--")) for line in lines):
        return lines
    return re.split(r"(?<=[.:;]) (?=[A-Z*`])", " ".join(part.split()))


@cache
def _names() -> set[str]:
    from gpu_day import PARTS

    return {part.name for part in PARTS}


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _half_a_digit(number: str) -> float:
    """Return half of the last written digit, the largest error of rounding."""
    mantissa, _, exponent = number.partition("e")
    return 0.5001 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


if __name__ == "__main__":
    sys.exit(main(ROOT))
