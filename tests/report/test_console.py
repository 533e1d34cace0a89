import io
import json
import os
import pty
import threading
import time
from contextlib import closing

import pytest

from dppo_megatron.report import console
from dppo_megatron.report.console import ProgressView
from tests.support.records import step_record

NAMED_SET = {
    "eval/aime/avg@4": 0.25, "eval/aime/avg@4_stderr": 0.1, "eval/aime/reward_mean": 0.5, "eval/aime/failed_share": 0.0,
    "eval/aime/response_tokens_mean": 12.0, "eval/aime/truncated_share": 0.0, "eval/aime/prompts": 8,
}  # fmt: skip


def evaluation(step: int, accuracy: float, reward: float) -> dict:
    right = {"eval/accuracy": accuracy, "eval/reward_mean": reward, "eval/prompts": 64}
    return {"step": step, "time": 1000.0 + step, **right, "eval/response_tokens_mean": 8.0, "eval/version_spread": 0}


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def test_plain_lines_are_aligned_and_evaluations_have_lines_of_their_own():
    out = io.StringIO()
    with closing(ProgressView(200, out, plain_interval_s=0)) as view:
        view.note("engine-0 ready")
        view.update(evaluation(0, 0.25, 0.25))
        view.update(step_record(9, 1002.0))
        view.update(step_record(10, 1005.0, **{"policy/masked_share": 0.1234, "mismatch/kl": None}))
        view.update(evaluation(10, 0.5, 0.5))
        view.update({"step": 11, "time": 1007.0, "time/generate_s": 1.0})
        view.update(step_record(200, 2000.0, **{"train/skipped_updates": 2.0}))
    assert out.getvalue() == (
        "engine-0 ready\n"
        "held-out at step 0: 16 of 64 right\n"
        f"{clock(1002)} step   9/200 | reward  0.480 | masked  0.40% | mismatch  2.0e-09 |   1,500 tok/s"
        " |    2.0 s/step |  0:06:22 left\n"
        f"{clock(1005)} step  10/200 | reward  0.500 | masked 12.34% | mismatch      n/a |   1,500 tok/s"
        " |    2.0 s/step |  0:09:30 left\n"
        "held-out at step 10: 32 (+16) of 64 right (change since step 0)\n"
        f"{clock(2000)} step 200/200 | reward  4.300 | masked  0.40% | mismatch  2.0e-09 |   1,500 tok/s"
        " |    2.0 s/step |  0:00:00 left | 2 updates skipped\n"
    )


def test_a_graded_reward_is_shown_where_no_answer_is_right():
    out = io.StringIO()
    with closing(ProgressView(40, out)) as view:
        view.update(evaluation(0, 0.0, 0.015))
        view.update(evaluation(40, 0.0, 0.415))
        view.update({"step": 40, "time": 1.0, **NAMED_SET})
    assert out.getvalue() == (
        "held-out at step 0: 0 of 64 right, mean reward 0.015\n"
        "held-out at step 40: 0 (+0) of 64 right, mean reward 0.415 (+0.400) (change since step 0)\n"
        "held-out at step 40: aime: avg@4 0.2500 ± 0.1000, mean reward 0.500; 12 tokens, 0.0% truncated, 8 prompts "
        "(change since step 0)\n"
    )


def test_turns_calls_and_errors_of_agents_are_in_the_line_of_their_step():
    out = io.StringIO()
    calls = {"environment/turns_mean": 3.25, "environment/calls_mean": 2.5, "environment/call_errors_mean": 0.5}
    with closing(ProgressView(40, out)) as view:
        view.update({"step": 1, "time": 1000.0, **calls})  # of the orchestrator, which may be ahead of the trainer
        view.update({"step": 2, "time": 1000.5, **dict.fromkeys(calls, 9.0)})
        view.update(step_record(1, 1001.0))
    assert " | turns  3.2 | calls  2.5 | call errors  0.5 | masked" in out.getvalue()


def test_plain_lines_come_at_most_every_interval_and_for_the_last_step():
    out = io.StringIO()
    with closing(ProgressView(40, out, plain_interval_s=10)) as view:
        for step in range(1, 41):
            view.update(step_record(step, 1000.0 + step))
    assert [line.split()[2] for line in out.getvalue().splitlines()] == [f"{n}/40" for n in (1, 11, 21, 31, 40)]


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"train/updates": 0.0, "rollout/reward_mean": 0.5}, "| no signal, no update\n"),
        ({"rollout/reward_failed": 144.0, "rollout/reward_mean": 0.5}, " | 144 of 192 samples failed\n"),
        ({"train/loss": 2.5}, "loss  2.50e+00"),
    ],
)
def test_a_step_line_names_unusual_values(record, shown):
    out = io.StringIO()
    with closing(ProgressView(2, out, samples=192)) as view:
        view.update({"step": 1, "time": 1000.0, "time/step_s": 1.0, **record})
    assert shown in out.getvalue()


def test_poll_follows_a_file_and_skips_the_steps_that_a_resumed_run_repeats(tmp_path):
    path, out = tmp_path / "metrics.jsonl", io.StringIO()

    def write(steps, mode="a"):
        with path.open(mode) as file:
            file.writelines(json.dumps(step_record(s, 1000.0 + s)) + "\n" for s in steps)

    def shown():
        steps = [line.split()[2] for line in out.getvalue().splitlines()]
        out.seek(0)
        out.truncate()
        return steps

    view = ProgressView(9, out, plain_interval_s=0)
    assert view.poll(path) is False
    write([1, 2])
    assert view.poll(path) is True
    assert shown() == ["1/9", "2/9"]

    resumed = ProgressView(9, out, plain_interval_s=0)
    write([3])
    resumed.poll(path)
    assert shown() == []  # the launcher names the step after which the run resumes
    path.rename(tmp_path / "old")
    write([1, 2])  # the trainer removed step 3
    resumed.poll(path)
    write([3, 4])
    resumed.poll(path)
    assert shown() == ["3/9", "4/9"]
    path.rename(tmp_path / "first attempt")
    write([4])
    after_a_pause = ProgressView(9, out, plain_interval_s=0)
    after_a_pause.poll(path)
    with path.open("a") as file:  # an hour later
        file.write(json.dumps(step_record(5, 4605.0)) + "\n")
    after_a_pause.poll(path)
    assert "0:00:08 left" in out.getvalue().splitlines()[-1]  # 4 steps of 2 s


def test_a_sparse_reading_of_a_long_run_shows_the_same_as_the_whole_file(tmp_path, monkeypatch):
    path, shown = tmp_path / "metrics.jsonl", []
    records = [step_record(step, 1000.0 + step) for step in range(1, 1001)]
    for step, accuracy in ((0, 0.25), (300, 0.5), (500, 0.75)):
        records.insert(step + 3, {"step": step, "time": 1003.0 + step, "eval/accuracy": accuracy})
    monkeypatch.setattr(time, "localtime", time.gmtime)
    for select in (console.sparse, iter):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        monkeypatch.setattr(console, "sparse", select)
        out = io.StringIO()
        view = ProgressView(1100, out, plain_interval_s=0)
        monkeypatch.setattr(view._view, "show", lambda *bar, out=out: out.write(f"{bar}\n"))
        view.poll(path)
        with path.open("a") as file:
            for record in (step_record(1001, 2001.0), {"step": 1000, "time": 2002.0, "eval/accuracy": 0.5}):
                file.write(json.dumps(record) + "\n")
        view.poll(path)
        shown.append(out.getvalue())
    assert shown[0] == shown[1]
    assert "held-out 50.0% (+25.0%)" in shown[0]


def test_a_record_without_step_or_time_is_passed_over(tmp_path):
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    view = ProgressView(2, out)
    view.poll(path)
    path.write_text('{"train/loss": 1.0}\n{"step": 1}\n' + json.dumps(step_record(2, 1002.0)) + "\n")
    view.poll(path)
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["2/2"]


def test_notes_lose_control_codes_and_characters_that_the_stream_cannot_encode():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    view = ProgressView(1, stream)
    view.note("\x1b[31mdied\x1b[0m \x07of \u4e2d\nnext")
    view.close()
    assert raw.getvalue() == b"died of ?\nnext\n"


def test_a_closed_stream_silences_the_view():
    out = io.StringIO()
    view = ProgressView(1, out)
    out.close()
    view.note("nobody hears this")
    view.update(step_record(1, 1000.0))
    view.close()


def test_terminal_gets_a_bar_with_values_and_the_cursor_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = pty.openpty()
    shown = bytearray()

    def drain():
        while True:
            try:
                shown.extend(os.read(ours, 4096))
            except OSError:
                return

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        view = ProgressView(10, terminal)
        view.update(evaluation(0, 0.25, 0.25))
        view.update(step_record(1, time.time()))
        view.update(evaluation(4, 0.5, 0.5))
        view.update(step_record(4, time.time()))
        view.note("a note")
        view.close()
    reader.join(5)
    text = shown.decode()
    for part in ("step 4/10", "reward 0.380 (+0.060)", "masked 0.40%", "1,500 tok/s", "left", "a note"):
        assert part in text
    assert "held-out 50.0% (+25.0%)" in text
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_an_idle_poll_is_cheap(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step_record(s, 1000.0 + s)) + "\n" for s in range(1, 501)))
    view = ProgressView(500, io.StringIO())
    view.poll(path)
    started = time.process_time()
    for _ in range(200):
        view.poll(path)
    assert (time.process_time() - started) / 200 < 1e-3
