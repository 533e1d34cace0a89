"""The data of the page for a run, a crashed run and a bank without a run. test_page.py tests the page itself."""

import base64
import gzip
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_tensors
from typer.testing import CliRunner

from dppo_megatron.bank import BankReader
from dppo_megatron.cli import app
from dppo_megatron.config import read_config
from dppo_megatron.lab.view import rows, source, tokens, write_view
from dppo_megatron.report.run_state import RunState
from dppo_megatron.train.trainer.step_samples import StepSamples

from .runs import GROUPS, HOSTILE, SAMPLES, STEPS, TURNS_AT, make_group, write_bank, write_run, write_trained_tokens

BEFORE = Path(__file__).parents[2] / "data" / "run_before"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("view"))


class Page:
    def __init__(self, path: Path):
        self.html = path.read_text()
        found = re.findall(r'<script type="text/plain" id="blob-([a-z0-9-]+)">([A-Za-z0-9+/=]*)</script>', self.html)
        self.blobs = {name: gzip.decompress(base64.b64decode(data)) for name, data in found}
        self.head = json.loads(self.blobs["head"])
        self.table = load_tensors(self.blobs["table"])

    @property
    def notes(self) -> str:
        return "\n".join(self.head["notes"])

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        return load_tensors(self.blobs[name])


@pytest.fixture(scope="module")
def page(run) -> Page:
    return Page(write_view(run))


def trained(page: Page) -> np.ndarray:
    return page.table["set"] == 0


def test_every_sample_has_a_row_with_the_values_of_the_index(run, page):
    reader = BankReader(run / "bank")
    entries = reader.entries(0, reader.refresh())
    table = {name: values[trained(page)] for name, values in page.table.items()}
    prompts = [entry.position for entry in entries for _ in range(entry.num_samples)]
    assert table["prompt"].tolist() == prompts
    np.testing.assert_array_equal(table["reward"], np.concatenate([e.rewards for e in entries]))
    np.testing.assert_array_equal(table["tokens"], np.concatenate([e.sampled for e in entries]))
    assert table["step"].tolist() == [1 + p // GROUPS for p in table["prompt"]]
    assert table["staleness"].tolist() == [min(step - 1, 1) for step in table["step"]]
    assert table["detail"].all()
    assert page.head["notes"] == []


def test_advantages_are_those_that_the_trainer_computes(run, page):
    reader, config = BankReader(run / "bank"), read_config(run / "config.yaml")
    entries = reader.entries(0, reader.refresh())
    expected = []
    for begin in range(0, STEPS * GROUPS, GROUPS):
        of_step = entries[begin : begin + GROUPS]
        found = StepSamples.from_entries(of_step, config).advantages[:, :, 0]
        expected += [a[e.trajectories] for a, e in zip(found, of_step, strict=True)]
    np.testing.assert_array_equal(page.table["advantage"][trained(page)], np.concatenate(expected))
    assert not np.array_equal(np.concatenate(expected), page.table["reward"][trained(page)])


def test_a_group_holds_the_tokens_of_the_bank(run, page):
    reader = BankReader(run / "bank")
    group = reader.read(reader.entries(0, reader.refresh())[TURNS_AT])
    found = page.tensors(f"group-{TURNS_AT}")
    assert len(group.rollouts) == SAMPLES + 1  # a trajectory has two branches
    fields = {"ids": "token_ids", "logprob": "rollout_logprob", "topk_logprob": "rollout_topk_logprob"}
    for name in ("teacher_logprob", "ids", "logprob", "versions", "topk_ids", "topk_logprob", "spans"):
        field = fields.get(name, name)
        np.testing.assert_array_equal(found[name], np.concatenate([getattr(r, field) for r in group.rollouts]), name)
    counts = [[len(r.token_ids), len(r.versions), len(r.spans)] for r in group.rollouts]
    assert found["counts"].tolist() == counts
    texts = json.loads(page.blobs["texts"])
    assert {texts[str(token)] for token in found["ids"].tolist()} == {chr(t + 30) for t in found["ids"].tolist()}


def test_answers_of_evaluations_are_rows_of_their_set(page):
    table = {name: values[~trained(page)] for name, values in page.table.items()}
    assert page.head["sets"] == ["training", "sums"]
    assert (table["set"].tolist(), table["step"].tolist(), table["reward"].tolist()) == ([1, 1], [2, 2], [1.0, 0.0])
    (record,) = json.loads(page.blobs["answers-0"])
    assert record["samples"][0]["text"] == HOSTILE


def test_curves_have_every_metric_of_every_step(page):
    curves = page.tensors("curves")
    assert curves["steps"].tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(curves["m:rollout/reward_mean"], [0.32, 0.34, 0.36, 0.38])
    assert page.head["metrics"]["train/grad_norm"][0] == "1"
    assert page.head["summary"]["steps"] == "4"
    assert page.head["summary"]["state"] == "paused at step 4"


def test_stored_values_of_the_trainer_are_at_their_tokens(tmp_path):
    run = write_run(tmp_path)
    write_trained_tokens(run, 5)
    (run / "tokens" / "step-000009-r000.safetensors").write_bytes(b"cut")
    page = Page(write_view(run))
    found, group = page.tensors("group-5"), make_group(5, 2)
    sizes = [len(r.versions) for r in group.rollouts]
    stored = sum(sizes[:-1])
    ratio = found["trainer_logprob"] - found["logprob"]
    index = np.concatenate([np.arange(size) for size in sizes[:-1]])
    np.testing.assert_allclose(ratio[:stored], np.where(index % 2, 0.5, -0.25), atol=1e-6)
    assert np.isnan(found["trainer_divergence"][stored:]).all()
    assert "trainer_logprob" not in page.tensors("group-6")
    shares = page.table["masked"][page.table["prompt"] == 5]
    np.testing.assert_allclose(shares, [*(size // 2 / size for size in sizes[:-1]), np.nan], rtol=1e-6)
    assert "step-000009-r000.safetensors: not read" in page.notes


def test_a_run_that_was_killed_in_its_first_step(tmp_path):
    run = write_run(tmp_path)
    (run / "metrics.jsonl").write_text('{"step": 1, "ti')
    index = sorted((run / "bank").glob("*.jsonl"))[-1]
    index.write_bytes(index.read_bytes()[:-200])
    head = run / "bank" / "head.json"
    head.write_text(json.dumps({k: v for k, v in json.loads(head.read_text()).items() if k != "closed"}))
    with (run / "answers" / "sums" / "v000002.jsonl").open("a") as file:
        file.write('{"position": 1, "samp')
    page = Page(write_view(run))
    whole = STEPS * GROUPS - 1
    assert len(np.unique(page.table["prompt"][trained(page)])) == whole
    assert "has not ended its first step" in page.notes
    assert "v000002.jsonl: 1 lines are not answers" in page.notes


def test_damaged_parts_are_reported_and_the_rest_is_shown(tmp_path):
    run = write_run(tmp_path)
    first, *_, last = sorted((run / "bank").glob("*.bin"))
    data = bytearray(first.read_bytes())
    data[-9] ^= 1
    first.write_bytes(data)
    last.unlink()
    (run / "config.yaml").write_text("rollout: {prompts_per_step: 3}\nnothing: here\n")
    page = Page(write_view(run))
    assert page.table["detail"][trained(page)].sum() < trained(page).sum() == SAMPLES * STEPS * GROUPS + 1
    assert "4 groups cannot be read, the first: " in page.notes
    assert "Settings are not known" in page.notes
    assert "No tokenizer is known" in page.notes
    index = run / "bank" / "segment-000001.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"rewards"', b'"reworse"', 1))
    page = Page(write_view(run))
    assert "The bank cannot be read to its end: " in page.notes
    assert page.table["step"][trained(page)].tolist() == [1] * GROUPS * SAMPLES


def test_a_bank_without_a_run_and_one_of_an_earlier_version_are_shown(tmp_path):
    page = Page(write_view(write_bank(tmp_path / "bank")))
    assert page.table["step"].tolist() == [1 + p // GROUPS for p in page.table["prompt"]]
    assert np.isnan(page.table["staleness"]).all()
    assert len(page.tensors("curves")) == 1
    old = Page(write_view(BEFORE / "bank", tmp_path / "old.html", BEFORE / "model"))
    assert (len(old.table["step"]), old.table["step"].max()) == (64, 4)
    assert json.loads(old.blobs["texts"])["3"] == "1"


@pytest.mark.slow
def test_whatever_file_is_damaged_a_page_is_written(tmp_path):
    run = write_run(tmp_path)
    write_trained_tokens(run, 5)
    rng = random.Random(7)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    for _ in range(200):
        path = rng.choice(files)
        data = path.read_bytes()
        at = rng.randrange(len(data))
        changed = bytearray(data)
        changed[at : at + rng.choice([0, 1, len(data)])] = rng.choice(
            [b"", b"null", b"1e999", b"-1", rng.randbytes(40)]
        )
        path.write_bytes(changed)
        write_view(run, tmp_path / "view.html")
        path.write_bytes(data)


def test_a_run_too_large_for_the_page_is_sampled_and_a_note_reports_it(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "TOKEN_SAMPLES", 2 * SAMPLES + 1)
    monkeypatch.setattr(source, "MAX_ROLLOUTS", 2 * GROUPS * SAMPLES)
    monkeypatch.setattr(rows, "ANSWER_BYTES", 100)
    page = Page(write_view(run, tmp_path / "a.html"))
    assert "2 of 4 steps are in the table, evenly spaced" in page.notes
    assert "Tokens of 2 of 6 groups are in this file, drawn at random (seed 0)" in page.notes
    assert "The page shows every " in page.notes
    assert set(page.table["step"][trained(page)].tolist()) == {1, 4}
    assert write_view(run, tmp_path / "b.html").read_bytes() == (tmp_path / "a.html").read_bytes()


def test_the_command_names_its_file_and_refuses_paths_that_are_no_run_or_bank(run, tmp_path):
    result = CliRunner().invoke(app, ["view", str(run), "--out", str(tmp_path / "page.html")])
    assert (result.exit_code, result.output.strip()) == (0, str(tmp_path / "page.html"))
    same = CliRunner().invoke(app, ["view", str(run), str(run / "config.yaml")])
    assert (same.exit_code, "names the same run twice" in str(same.exception)) == (1, True)
    (tmp_path / "config.yaml").write_text("run: {dir: elsewhere}\n")  # as of a project of `init`
    with pytest.raises(source.ViewError, match=r"neither a run .*; name the run.dir"):
        write_view(tmp_path)
    with pytest.raises(source.ViewError, match="names the same run twice; name different runs"):
        write_view(run, others=[run.parent / "model" / ".." / "run"])


def test_following_writes_until_the_run_ends(run, tmp_path, monkeypatch):
    states = iter(["running", "waiting", "finished", "finished"])
    monkeypatch.setattr("dppo_megatron.report.run_state.run_state", lambda *_: RunState(next(states), 3))
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    path = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["view", str(run), "--out", str(path), "--follow"])
    assert result.output.split() == [str(path)] * 3
    assert waits == [30, 30, 0]


def test_the_excerpt_of_a_response_is_its_beginning_even_with_chat_markers():
    sampled = "hm <|im_start|>user\nmyxl"
    prompt = "<|im_start|>user\na<|im_end|><|im_start|>user\nb"
    assert tokens.excerpts(prompt, [sampled, prompt + " answer"]) == ["b", "hm <|im_start|>user myxl", "answer"]
