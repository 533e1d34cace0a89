"""The node that drives a Slurm job checks a config in an environment that may have no torch."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them raises
import dppo_megatron.cli, dppo_megatron.run.slurm.job, dppo_megatron.run.slurm.submit
from dppo_megatron.run.checks import check_job, load_config
config = load_config("config.yaml", ["objective.settings.delta=0.2"])
check_job(config, "config.yaml", resume=False, nodes=(1,))
"""


def test_settings_are_checked_without_torch(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "run: {dir: run}\nmodel: {path: m}\ndata: {train: t}\ntrain: {steps: 1}\nslurm: {gpus_per_node: 2}\n"
    )
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
