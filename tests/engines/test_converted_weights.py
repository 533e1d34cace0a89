"""A directory that `convert` made of a Megatron checkpoint, in a real server: it says what Megatron says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from dppo_megatron.cli import app
from tests.support.engines import VOCAB

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

TOLERANCE = 1e-4
PROBE = np.random.default_rng(0).integers(2, VOCAB, 40).astype(np.int32)
_MEGATRON = """
import json, sys
from pathlib import Path
import torch
from dppo_megatron.convert.verify import outputs_of_megatron
from dppo_megatron.hf import SafetensorsDirectory
hf, checkpoint, ids = Path(sys.argv[1]), Path(sys.argv[2]), torch.tensor(json.loads(sys.argv[3]))
logits = outputs_of_megatron(hf, ids, checkpoint, SafetensorsDirectory(hf))["logits"][: len(ids) - 1]
print("LOGPROBS", json.dumps(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()))
"""


def convert(*arguments: object) -> None:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception


def test_engine_with_converted_weights_agrees_with_megatron(served, tmp_path):
    source = served.models["b"]  # not the model that the engine started with
    convert("hf-to-megatron", source, tmp_path / "megatron", "--tensor", 2, "--pipeline", 2)
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "hf", "--shard-gb", 0.0005)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1

    async def score(engine):
        before = await engine.score(PROBE)
        await engine.load_weights(tmp_path / "hf", 1, "abort")
        return before, await engine.score(PROBE)

    before, after = served.use(score)
    arguments = [str(source), str(tmp_path / "megatron"), json.dumps(PROBE.tolist())]
    done = subprocess.run(
        [sys.executable, "-c", _MEGATRON, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOGPROBS"))
    megatron = np.array(json.loads(line.removeprefix("LOGPROBS")))
    np.testing.assert_allclose(after, megatron, atol=TOLERANCE, rtol=0)
    assert np.abs(before - megatron).max() > 0.1
