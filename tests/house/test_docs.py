"""tools/check_docs.py finds each kind of mistake in the documentation."""

import re
import shutil
import subprocess
from pathlib import Path

import check_docs
import pytest

ROOT = Path(__file__).parents[2]

FIGURES = "2026-11-20-cpu-asynchronous.txt"


def problems(tmp_path, text):
    """Return the problems of a page in docs/ next to the repository's own files."""
    for name in ("dppo_megatron", "benchmarks", "examples", "tools", "slurm", "Makefile", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text(text)
    return list(check_docs.check_page(tmp_path, page))


def test_make_without_a_target_lists_the_targets():
    described = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = re.search(r"^\.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    parts = {"test-here", "test-elsewhere", "types"}  # of test-all and lint
    assert set(re.findall(r"^make (\S+)", described.stdout, re.MULTILINE)) == set(targets) - parts


def test_the_documentation_names_only_existing_things(capsys):
    assert check_docs.main(ROOT) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[here](nowhere.md)", "link to nowhere.md: no such file"),
        ("[here](../README.md#no-such-part)", "link to ../README.md#no-such-part: no such heading"),
        ("`trainer/lop.py`", "trainer/lop.py: no such file"),
        ("`train/trainer/loop.py: trian`", "train/trainer/loop.py has no trian"),
        ("`bank/writer.py: BankWriter.appendix`", "bank/writer.py has no BankWriter.appendix"),
        ("`make quikstart`", "make quikstart: no such target"),
        ("```\nmake instal   # first\n```", "make instal: no such target"),
        ("```\n.venv/bin/python tools/gone.py --x\n```", "python tools/gone.py: no such file"),
        ("`dppo-megatron trian CONFIG`", "dppo-megatron trian: no such command"),
        ("`dppo-megatron convert hf-to-gguf SRC`", "dppo-megatron convert hf-to-gguf: no such command"),
        ("`dppo-megatron trainer / enigne CONFIG`", "dppo-megatron enigne: no such command"),
        ("```\ndppo-megatron train CONFIG --resum\n```", "dppo-megatron train --resum: no such flag"),
        ("`--resum`", "--resum: no command has it"),
        ("```\ndppo-megatron train CONFIG --set rollout.stale=1\n```", "--set rollout.stale: no such setting"),
        ("`rollout.max_stale`", "rollout.max_stale: no such setting"),
        ("`rollout.topk_logprobs = 20`, `train.stepz: 3`", "train.stepz: no such setting"),
        ("`eval/acuracy`", "eval/acuracy: no such metric"),
        ("```yaml\nrollout:\n  max_stale: 1\n```", "YAML block: rollout.max_stale: no such setting"),
        ("`benchmarks/results/2020-never.txt`", "benchmarks/results/2020-never.txt: no such file"),
        (f"<!-- figures: {FIGURES} -->\nIt took 17.2 s, or 99.9 s.", f"99.9: nothing in benchmarks/results/{FIGURES}"),
    ],
)
def test_a_mistake_is_found(tmp_path, text, problem):
    found = problems(tmp_path, f"# Page\n\n{text}\n")
    assert len(found) == 1
    assert found[0].startswith(problem)


def test_a_page_with_valid_references_passes(tmp_path):
    text = """# A page

[above](#a-page), [README](../README.md#quickstart), [elsewhere](https://example.org/x),
`train/trainer/loop.py: Training.run`, `make quickstart`, `dppo-megatron trainer / engine CONFIG`,
`dppo-megatron convert ...`, `--resume`, `rollout.bank: D`, `your_package.module:attribute`, `objective.settings.delta`
"""
    assert not problems(tmp_path, text)


def test_a_measured_figure_may_be_rounded(tmp_path):
    text = f"<!-- figures: {FIGURES} -->\n| 17 s | 17.2 s | 2.5e-2 | 26.0 % |\n\nElsewhere 99.9 s may stand.\n"
    assert not problems(tmp_path, text)


def test_main_names_the_page_and_fails(tmp_path, capsys):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for path in ROOT.iterdir():
        if path.name != "docs" and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    assert check_docs.main(tmp_path) == 0, capsys.readouterr().out
    (tmp_path / "docs" / "plan.md").write_text("[x](gone.md)")
    for name, line in {"settings": "| `run.seed` |", "objectives": "| `dppo_binary_tv` |"}.items():
        page = tmp_path / "docs" / f"{name}.md"
        page.write_text(page.read_text().replace(line, "| `x` |"))
    assert check_docs.main(tmp_path) == 1
    said = capsys.readouterr().out
    assert "docs/plan.md: link to gone.md: no such file" in said
    for name in ("settings", "objectives"):
        assert f"docs/{name}.md: out of date; run python tools/tables.py" in said


def test_every_promise_about_failures_names_its_function_and_a_test():
    """check_docs resolves the names."""
    sections = (ROOT / "docs" / "failures.md").read_text().split("\n### ")[1:]
    named = re.compile(
        r"\*\*Kept by\*\* `(?!tests/)[\w/]+\.py: [\w.]+`;\s+\*\*broken\s+by\*\*\s+`tests/[\w/]+\.py: test_\w+`\."
    )
    assert len(sections) > 20
    assert [section.partition("\n")[0] for section in sections if not named.search(section)] == []
