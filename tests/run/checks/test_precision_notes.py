"""Dtypes that disagree or are slow, and settings that only an evaluation reads, give a note."""

import pytest

from dppo_megatron.config import Config
from dppo_megatron.run.checks import effects, training
from tests.run.checks.test_settings import config


@pytest.mark.parametrize(
    ("trainer", "engine", "fp16", "noted"),
    [
        ("fp32", "bf16", False, ["warning: engine.dtype = bf16: rounds most of a small update of model.dtype = fp32"]),
        ("fp16", "bf16", True, ["warning: engine.dtype = bf16: rounds"]),
        ("fp16", "fp16", False, ["warning: model.dtype = fp16: this CPU has no fp16 units"]),
        ("bf16", "fp16", False, ["warning: engine.dtype = fp16: this CPU has no fp16 units"]),
        ("fp16", "fp16", True, []),
        ("bf16", "bf16", False, []),
        ("bf16", "fp32", False, []),
    ],
)
def test_dtypes_that_disagree_or_are_slow_here_are_noted(tree, monkeypatch, trainer, engine, fp16, noted):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_fp16_supported", lambda: fp16)
    sections = {"model": tree["model"] | {"dtype": trainer}, "engine": tree["engine"] | {"dtype": engine}}
    found = list(training.precision_notes(Config.model_validate(tree | sections), local=True))
    assert [note.startswith(start) for note, start in zip(found, noted, strict=True)] == [True] * len(noted)


EVAL, SERVERS = "the run has given answers or rollouts, and evaluates nothing", "the servers of engine.urls already run"
URLS = 'engine.urls=["http://a:1"] '


@pytest.mark.parametrize(
    ("settings", "named", "why"),
    [
        (URLS + "engine.env.A=x", "engine.env.A = 'x'", SERVERS),
        (URLS + "engine.extra_args=[--x] engine.port=8000", "engine.port = 8000, engine.extra_args = ", SERVERS),
        (URLS + "engine.python=p", "engine.python = 'p'", SERVERS),
        (URLS + "engine.host=localhost", "engine.host = 'localhost'", SERVERS),
        ("objective.name=nll data.eval=e.jsonl", "data.eval = 'e.jsonl'", EVAL),
        (
            "rollout.bank=b data.eval=e.jsonl eval.sets.a.path=a.jsonl",
            "data.eval = 'e.jsonl', eval.sets.a.path =",
            EVAL,
        ),
        ("engine.env.A=x engine.python=p data.eval=e.jsonl", None, ""),
        (URLS + "engine.kv_cache_bytes=9000 engine.restarts=2 data.eval=e.jsonl", None, ""),  # limits and sizes
        ("rollout.bank=b eval.max_response_tokens=4", None, ""),
    ],
)
def test_settings_that_only_an_evaluation_reads_are_noted(settings, named, why):
    found = list(effects.notes(config(settings)))
    assert len(found) == (named is not None), found
    if named:
        assert found[0].startswith(f"warning: {named}")
        assert f": {why}" in found[0]
        assert found[0].endswith("; only `dppo-megatron eval` reads this setting")
