"""A conversion has one fused weight in memory at a time, not a shard and not the model."""

import json
import subprocess
import sys

import pytest

from tests.support.model_directories import write_model
from tests.support.models import CONFIGS
from tests.support.runs import environment

_MEASURED = """
import json, sys
from functools import partial
from pathlib import Path
from dppo_megatron.convert.layout import TargetLayout
from dppo_megatron.convert.job import convert
from dppo_megatron.convert.to_hf import ToHF
from dppo_megatron.convert.to_megatron import ToMegatron

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def both(source, out):
    convert(partial(ToMegatron, source, out / "m", TargetLayout(tensor=2)))
    convert(partial(ToHF, out / "m", out / "hf", source))

small, large, out = map(Path, sys.argv[1:])
both(small, out / "small")  # what is imported on the way does not count
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
both(large, out / "large")
print(json.dumps(status("VmHWM") - before))
"""


@pytest.mark.slow
def test_peak_is_a_few_weights(tmp_path):
    config = {**CONFIGS["qwen2"], "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    small = write_model(tmp_path / "small", CONFIGS["qwen2"])
    large = write_model(tmp_path / "large", config)
    command = [sys.executable, "-c", _MEASURED, str(small), str(large), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True, timeout=900)
    peak = json.loads(done.stdout)
    shard = max(file.stat().st_size for file in (tmp_path / "out" / "large").rglob("*.distcp"))
    weight = 2 * 2048 * 512 * 2  # gate and up in bf16
    assert shard > 30e6
    assert peak < 4 * weight, f"{peak / 1e6:.1f} MB for shards of {shard / 1e6:.1f} MB"
