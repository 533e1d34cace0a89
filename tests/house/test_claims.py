"""tools/check_claims.py finds claims in the documentation that a results file contradicts."""

import shutil
from pathlib import Path

import check_claims
import pytest

ROOT = Path(__file__).parents[2]
H100 = "2026-11-26-1-x-nvidia-h100-80gb-hbm3-gpu-day.txt"
TRL = "2026-11-28-cpu-end-to-end.txt"
CPU = f"[results](../benchmarks/results/{TRL})"


def problems(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    page = tmp_path / "page.md"
    page.write_text(text)
    return list(check_claims.check_page(tmp_path, page))


def test_no_results_file_contradicts_the_documentation(capsys):
    assert check_claims.main(ROOT) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"The quickstart takes 0.8123 s ({CPU}).", "0.8123: nothing in 2026-11-28-cpu-end-to-end.txt"),
        (f"Steps ({CPU}):\n\n| cell | s |\n|---|---|\n| 20 M | 5.18 |", "5.18: nothing in"),
        ("2026-11-28: the quickstart has 0.31 of TRL's step.", "0.31: nothing in"),
        ("2026-11-27: the quickstart has 0.92 of TRL's step.", "2026-11-27: no results file has this date"),
        ("An update takes 0.1234 s on one H100.", "0.1234: nothing in"),
        ("A copy has 2.95 TB/s on an H200.", None),  # no file of an H200 is there
        ("`optimizer.offload` has not run on a GPU.", f"`optimizer.offload` has not run on a GPU.: {H100} has"),
        ("| `sdpa` | not run on CUDA |", f"| `sdpa` | not run on CUDA |: {H100} has a result of sdpa"),
        ("Not yet: checkpoints on GPUs.", "Not yet: checkpoints on GPUs.: 2026-11-26"),
        ("A colocated run has run on a GPU.", "A colocated run has run on a GPU.: no results file has"),
        ("`broadcast` ran on two GPUs.", "`broadcast` ran on two GPUs.: no results file has a result of broadcast"),
    ],
)
def test_a_planted_contradiction_is_reported(tmp_path, text, problem):
    reported = problems(tmp_path, f"# Page\n\n{text}\n")
    assert len(reported) == (problem is not None), reported
    assert problem is None or reported[0].startswith(problem)


def test_claims_that_the_files_support_pass(tmp_path):
    text = f"""# Page

The quickstart takes 0.84 s, TRL 0.89 s ({CPU}). Its ratios are 92 % to 98 %.

## Another section

Nothing here is measured: 12.34. `colocated` has not run on a GPU.

`actor` ran on one H100: 22.7 GiB.
"""
    assert not problems(tmp_path, text)


def test_a_new_result_contradicts_an_old_page(tmp_path, capsys):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    assert check_claims.main(tmp_path) == 0, capsys.readouterr().out
    new = tmp_path / "benchmarks" / "results" / "2027-01-01-2-x-nvidia-h200-gpu-day.txt"
    new.write_text(
        "chip 0: NVIDIA H200, 132 multiprocessors\ncolocated      90.0 s  ok         a run whose engine shares\n"
    )
    assert check_claims.main(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "README.md: " in printed
    assert "docs/gpu_day.md: `colocated` and the parts for several GPUs have not run on a GPU.: 2027-01-01" in printed
