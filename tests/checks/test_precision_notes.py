"""Dtypes that are valid, but disagree or are slow, give a note."""

import pytest

from dppo_megatron.checks import training
from dppo_megatron.config import Config


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
    found = list(training.precision_notes(Config.model_validate(tree | sections), here=True))
    assert [note.startswith(start) for note, start in zip(found, noted, strict=True)] == [True] * len(noted)
