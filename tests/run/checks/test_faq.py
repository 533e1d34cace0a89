"""docs/faq.md: the command named for a failure gives the answer that the page quotes. Some failures are provoked."""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dppo_megatron.cli import app
from dppo_megatron.common.files import write_json
from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.report.run_state import record_attempt
from dppo_megatron.run.checks.resume import record
from dppo_megatron.run.preflight.findings import Reported, findings
from dppo_megatron.run.preflight.task import DONE, LOOKED
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor.checkpoint.directory import CheckpointError, newest
from tests.report.doctor.runs import STEPS, Groups, Row, write_run
from tests.run.checks.conftest import changed_model
from tests.support.tokenizers import save_character_model


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return f"{result.output}{result.exception}\n" if isinstance(result.exception, ExpectedError) else result.output


class Case:
    """A directory, a valid config in it, and commands on them."""

    def __init__(self, tree: dict, task: Path, directory: Path, character_model: Path):
        self.tree, self.task, self.directory, self.character_model = tree, task, directory, character_model
        self.run_dir = RunDir(directory / "run")

    def validate(self, **sections: dict) -> str:
        return run("validate", self.config(**sections))

    def config(self, **sections: dict) -> Path:
        tree = {name: self.tree.get(name, {}) | sections.get(name, {}) for name in {**self.tree, **sections}}
        path = self.directory / "c.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    def doctor(self, change: Callable[[int, Row, Groups], Groups | None]) -> str:
        return run("doctor", write_run(self.directory, self.character_model, change))

    def doctor_of(self, log: str, text: str, cause: str = "exit code 1") -> str:
        """Of a run that ended with this text in a log, and the cause that its launcher recorded."""
        self.run_dir.logs.mkdir(parents=True)
        self.run_dir.log(log).write_text(f"2026-11-29 12:00:00,000 {log} INFO model: loaded\n{text}\n")
        record_attempt(self.run_dir, "failed", f"{log} ended: {cause}")
        return run("doctor", self.run_dir.root)


def undefined_symbol(case: Case) -> str:
    return case.doctor_of("engine-0", "ImportError: /venv/vllm/_C.abi3.so: undefined symbol: _ZN5torch3jit17parse")


def megatron_extensions(case: Case) -> str:
    return case.doctor_of(
        "trainer-0",
        "RuntimeError: the custom CUDA extension fused_weight_gradient_mlp_cuda module is not found.",
    )


def other_version(case: Case) -> str:
    about = case.directory / "vllm-0.31.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
    (about / "top_level.txt").write_text("vllm\n")
    (case.directory / "vllm.py").touch()
    python = case.directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={case.directory} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return case.validate(engine={"python": str(python)})


def sgl_kernel(case: Case) -> str:
    return case.doctor_of("engine-0", "ImportError: \n[sgl_kernel] CRITICAL: Could not load any common_ops library!")


def out_of_memory(case: Case) -> str:
    return case.doctor_of("trainer-0", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")


def hang(case: Case) -> str:
    case.run_dir.root.mkdir()
    case.run_dir.metrics.write_text('{"step": 7, "time": 9e9, "train/loss": 0.5}\n')
    now = time.time()
    for rank, silent_s in ((0, 0), (1, 90)):
        beat = {"host": f"node{rank}", "pid": 100 + rank, "phase": "reduce", "step": 8, "moves": 3, "waits": rank == 0}
        beat |= {
            "since": now - silent_s,
            "time": now - silent_s,
            "call": "all_reduce (train/actor/optimizer.py, line 112)",
        }
        write_json(case.run_dir.heartbeats / f"trainer-{rank}", beat)
    with case.run_dir.take():
        record_attempt(case.run_dir, "started", "")
        return run("doctor", case.run_dir.root)


def watchdog(case: Case) -> str:
    return case.doctor_of(
        "trainer-3",
        "[rank3]:[E321 02:07:08 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600060 ms",
    )


def slurm(case: Case) -> str:
    """Two ranks with one GPU, and a node that the others do not reach."""
    tasks = {f"rank-{rank}": Reported(f"node{rank // 2}", DONE, {"gpu": f"GPU-{rank % 2}"}) for rank in range(4)}
    tasks["rank-1"].facts["gpu"] = "GPU-0"
    tasks["rank-3"] = Reported("node1", LOOKED, {"gpu": "GPU-1"})
    return "\n".join(map(str, findings(tasks, {}, {})))


def sizes(case: Case) -> str:
    return case.validate(rollout={"prompts_per_step": 16, "group_size": 8}, train={"updates_per_step": 4})


def flat_reward(case: Case) -> str:
    def equal(step: int, row: Row, groups: Groups) -> None:
        row["rollout/groups_without_signal"] = float(len(groups))

    return case.doctor(equal)


def endless(case: Case) -> str:
    model = Path(changed_model(case.task, case.directory / "model", eos_token_id=None))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    (model / "generation_config.json").unlink()
    truncated = case.doctor(lambda step, row, groups: row.update({"rollout/truncated_share": 0.97}))
    return case.validate(model={"path": str(model)}) + truncated


def columns(case: Case) -> str:
    rows = [{"question": "1+1=", "solution": {"value": "2"}}]
    (case.directory / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return case.validate(data={"train": str(case.directory / "t.jsonl")})


def lost_weights(case: Case) -> str:
    return case.doctor(lambda step, row, groups: row.update({"mismatch/kl": 0.4 if step > 3 else 1e-4}))


def resume(case: Case) -> str:
    config = case.config()
    case.run_dir.root.mkdir()
    record(Config.model_validate(case.tree))
    other = run("train", config, "--resume", "--set", "optimizer.beta1=0.5")
    checkpoint = case.run_dir.checkpoints / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text('{"st')
    with pytest.raises(CheckpointError) as raised:
        newest(case.run_dir.checkpoints)
    error = f"CheckpointError: {raised.value}"
    return other + case.doctor_of("trainer-0", error, error)


def mismatch(case: Case) -> str:
    def differs(step: int, row: Row, groups: Groups) -> None:
        row["mismatch/kl"] = 0.05
        row["train/grad_norm"] = 900.0 if step == STEPS else 0.5

    return case.doctor(differs)


PAGE = (Path(__file__).parents[3] / "docs" / "faq.md").read_text()
CASES = (
    undefined_symbol, megatron_extensions, other_version, sgl_kernel, out_of_memory, hang, watchdog, slurm, sizes,
    flat_reward, endless, columns, lost_weights, resume, mismatch,
)  # fmt: skip


@pytest.fixture(scope="module")
def character_model(tmp_path_factory) -> Path:
    return save_character_model(tmp_path_factory.mktemp("model"))


def answers(number: int) -> list[re.Pattern[str]]:
    """Return the lines that the page quotes about a failure, in which ... stands for any text."""
    section = re.search(rf"^## {number}\. .*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in re.findall(r"^```\n(.*?)^```$", section[0], re.M | re.S) for line in block.splitlines()]
    return [re.compile(re.escape(line).replace(re.escape("..."), ".*")) for line in lines]


def test_the_page_has_fifteen_failures():
    assert re.findall(r"^## (\d+)\.", PAGE, re.MULTILINE) == [str(number) for number in range(1, len(CASES) + 1)]


@pytest.mark.parametrize(("number", "provoke"), list(enumerate(CASES, 1)))
def test_the_failure_has_the_answer_of_the_page(tree, task, tmp_path, character_model, number, provoke):
    output = provoke(Case(tree, task, tmp_path, character_model))
    wanted = answers(number)
    assert wanted
    assert [line.pattern for line in wanted if not any(map(line.fullmatch, output.splitlines()))] == [], output
