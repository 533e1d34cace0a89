"""The log of masked tokens and its table in the report."""

import io
import json

from rich.console import Console

from dppo_megatron.report.masked_tokens import MaskedTokenLog, masked_rows
from dppo_megatron.report.report import write_report
from dppo_megatron.report.tail import read_records
from dppo_megatron.run_dir import RunDir


def decode(token: int) -> str:
    return {1: " Wait", 2: "|", 3: "[/b]"}.get(token, f"t{token}")


def test_a_step_keeps_its_ten_most_masked_tokens(tmp_path):
    opened = MaskedTokenLog(tmp_path, decode, None)
    opened.log(1, {})
    opened.log(2, dict.fromkeys(range(20, 40), 1) | {1: 12, 2: 8})
    opened.close()
    (record,) = read_records(RunDir(tmp_path).masked_tokens)
    assert (record["step"], record["masked"], len(record["tokens"])) == (2, 40, 10)
    assert record["tokens"][:3] == [
        {"id": 1, "text": " Wait", "count": 12, "share": 0.3},
        {"id": 2, "text": "|", "count": 8, "share": 0.2},
        {"id": 20, "text": "t20", "count": 1, "share": 0.025},
    ]


def test_the_run_adds_up_its_steps():
    records = [
        {"step": 1, "masked": 10, "tokens": [{"id": 1, "text": " Wait", "count": 4, "share": 0.4}]},
        {"step": 2, "masked": 6, "tokens": [{"id": 2, "text": "|", "count": 3, "share": 0.5},
                                            {"id": 1, "text": " Wait", "count": 2, "share": 0.3}]},
    ]  # fmt: skip
    assert masked_rows(records) == {"1": "' Wait' 6 (37.5%)", "2": "'|' 3 (18.8%)"}
    assert masked_rows([]) == {}


def test_the_report_shows_them(make_run):
    run, other = make_run("run"), make_run("other")
    tokens = [{"id": i, "text": decode(i), "count": 10 - i, "share": 0.1} for i in (1, 2, 3)]
    RunDir(run).masked_tokens.write_text(json.dumps({"step": 1, "masked": 24, "tokens": tokens}) + "\n")
    console = Console(file=io.StringIO(), width=120)
    text = write_report(run, console=console).read_text()
    assert "## Most masked tokens" in text
    assert "| 2 | '\\|' 8 (33.3%) |" in text
    assert "'\\[/b\\]' 7 (29.2%)" in text
    assert "| 1 | ' Wait' 9 (37.5%) | - |" in write_report([run, other], console=console).read_text()
    assert "Most masked tokens" not in write_report(other, console=console).read_text().split("Masked share counts")[0]
