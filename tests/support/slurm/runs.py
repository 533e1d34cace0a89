"""Submits runs as a user does, and watches them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from dppo_megatron.run.slurm.attempts import AttemptEvent, AttemptLog
from dppo_megatron.run_dir import RunDir
from tests.support.slurm.lab import Lab, wait_until
from tests.support.slurm.rewards import GROUPS

ROOT = Path(__file__).parents[3]
STEPS = 4
TIMEOUT_S = 900


def quickstart(task: Path, run_dir: Path, **changes: dict) -> dict:
    """Return the quickstart's config with a random policy and few small steps, two trainer nodes and an engine node."""
    tree = yaml.safe_load((ROOT / "examples" / "quickstart" / "config.yaml").read_text())
    tree["run"]["dir"] = str(run_dir)
    tree["model"]["path"] = str(task / "random_model")
    tree["data"] |= {"train": str(task / "train.jsonl"), "eval": str(task / "heldout.jsonl")}
    tree["reward"] = {"name": "tests.support.slurm.rewards:even_digits", "timeout_s": TIMEOUT_S}
    tree["rollout"] |= {"prompts_per_step": GROUPS, "group_size": 4}
    tree["train"]["steps"] = STEPS
    tree["optimizer"]["lr"] = 1e-3
    tree["engine"]["kv_cache_bytes"] = 1 << 28
    tree["checkpoint"] = {"every": 2}
    tree["eval"]["every"] = 0
    tree["tracking"] = {}
    tree["slurm"] = {
        "trainer_nodes": 2, "engine_nodes": 1, "gpus_per_node": 1, "time": "30", "signal_lead_s": 60, "interface": "lo",
        "preflight": False,
    }  # fmt: skip
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    for teacher in tree.get("distillation", {}).get("teachers", {}).values():
        teacher["path"] = tree["model"]["path"]
    return tree


@dataclass
class Run:
    """Represents a run in the lab: config file, directory, and the last job submitted for it."""

    lab: Lab
    directory: Path
    config: Path
    gate: Path
    job: str = ""

    @classmethod
    def write(cls, lab: Lab, task: Path, directory: Path, **changes: dict) -> Run:
        config = directory / "config.yaml"
        config.write_text(yaml.safe_dump(quickstart(task, directory / "run", **changes)))
        return cls(lab, directory / "run", config, directory / "gate")

    @property
    def output(self) -> Path:
        return self.directory.parent / "output"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "SLURM_TEST_GATE": str(self.gate),
            "PYTHONPATH": os.environ["PYTHONPATH"],
            "VENV": str(Path(sys.executable).parents[1]),
            "OMP_NUM_THREADS": "1",
        }

    def sbatch(self, script: str, *options: str, arguments: tuple[str, ...] = ()) -> None:
        """Submit a script from the run's parent directory, with the config and `arguments`."""
        self.submit(script, *options, arguments=(str(self.config), *arguments))

    def submit(self, script: str, *options: str, arguments: tuple[str, ...]) -> None:
        self.job = self.lab.run(
            "sbatch", "--parsable", "--time=30", f"--output={self.output}", f"--chdir={self.directory.parent}",
            *options, str(ROOT / "slurm" / script), *arguments, environment=self.environment,
        )  # fmt: skip

    def command(self, *arguments: str | Path) -> str:
        command = [sys.executable, "-m", "dppo_megatron", *map(str, arguments)]
        return self.lab.run(*command, environment=self.environment, timeout_s=TIMEOUT_S)

    @property
    def state(self) -> str:
        return self.lab.job(self.job)["JobState"]

    def wait_for_step(self, step: int) -> None:
        metrics = RunDir(self.directory).metrics
        self.wait_until(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(), f"step {step}")

    def wait_for_end(self) -> str:
        """Wait for the job's end, and return the final state. A job that is being requeued has not ended."""
        self.wait_until(lambda: self.state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), "the job's end")
        return self.state

    def wait_until(self, condition, what: str) -> None:
        wait_until(condition, what, TIMEOUT_S, self.everything)

    def everything(self) -> str:
        """Return logs and events for the message of a failed test."""
        logs = [self.output, *sorted(self.directory.glob("logs/*.log")), *sorted(self.directory.glob("logs/*.out"))]
        texts = [f"== {log}\n{log.read_text()[-3000:]}" for log in logs if log.exists()]
        return "\n".join([str(self.lab.job(self.job)), *map(str, self.events()), *texts])

    def events(self) -> list[AttemptEvent]:
        return AttemptLog(RunDir(self.directory)).events()
