"""SmolLM2-135M-Instruct, one server of it at a time, and one run on it that most rows read."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.language_model.model import ROOT, ModelUnavailable, model_directory
from tests.rollout.engines.conftest import Served
from tests.support import runs
from tests.support.engines import engine_config, running_server

REPOSITORY = Path(__file__).parents[2]
PROMPTS = SAMPLES = 8  # 64 sequences a step
TREE = {
    "run": {"stall_timeout_s": 600},
    "parallel": {"world_size": 1, "tensor": 1, "timeout_s": 600},
    "data": {"max_prompt_tokens": 64, "chat_template": True},
    "rollout": {"prompts_per_step": PROMPTS, "group_size": SAMPLES, "max_response_tokens": 24},
    "train": {"steps": 2, "updates_per_step": 1, "micro_batch_tokens": 512},  # few logits at a time
    "optimizer": {"lr": 5e-6},
    "engine": {"max_model_len": 128},
    "checkpoint": {"every": 1, "keep": 1},
}
rows: dict[str, list] = {}  # test -> seconds with its fixtures, outcome


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "language_model" in report.keywords:
        row = rows.setdefault(report.nodeid.partition("::")[2], [0.0, "passed"])
        row[0] += report.duration
        if report.when == "call":
            row[1] += "".join(f", {name} {value}" for name, value in report.user_properties)
        if not report.passed:
            row[1] = report.outcome.upper() + (f": {report.longrepr[2]}" if report.skipped else "")


def pytest_terminal_summary(terminalreporter) -> None:
    if rows:
        terminalreporter.section("seconds per row of the language model")
        for name, (seconds, outcome) in rows.items():
            terminalreporter.write_line(f"{seconds:7.1f}  {name}  {outcome}")
        terminalreporter.write_line(f"{sum(seconds for seconds, _ in rows.values()):7.1f}  all")


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """A directory with the model as `random_model`, eight sums to train on, an epoch a step, and eight others."""
    try:
        model = model_directory(REPOSITORY / ROOT)
    except ModelUnavailable as error:
        if "LANGUAGE_MODEL_REQUIRED" in os.environ:  # `.ci/run` knows that the index has it
            raise
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("language_model") / "task"
    directory.mkdir()
    (directory / "random_model").symlink_to(model)
    for number, name in enumerate(("train", "heldout")):
        sums = [(23 + 7 * i + number, 45 + 5 * i) for i in range(PROMPTS)]
        lines = [{"prompt": f"What is {a} + {b}? Reply with only the number.", "answer": str(a + b)} for a, b in sums]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


@pytest.fixture(scope="session")
def served(task) -> Iterator[Callable[..., Served]]:
    """f(kind, dtype) -> a server; another one that ran is ended before, because each has gigabytes."""
    running: dict[tuple[str, str], Served] = {}
    model = task / "random_model"
    with ExitStack() as stack:

        def start(kind: str = "vllm", dtype: str = "fp32") -> Served:
            if (kind, dtype) not in running:
                stack.close()
                running.clear()
                config, log = engine_config(model, kind=kind, dtype=dtype), task / f"{kind}-{dtype}.log"
                url = stack.enter_context(running_server(config, log, version=0))
                running[kind, dtype] = Served(config, url, log, {"a": model})
            server = running[kind, dtype]
            if server.use(lambda engine: engine.info()).version:
                server.use(lambda engine: engine.load_weights(model, 0, "abort"))
            return server

        yield start


@pytest.fixture(scope="session")
def tree(task) -> Callable[..., dict]:
    """f(name, urls, **sections) -> the config of a run of two steps, in a directory of that name."""

    def build(name: str, urls: tuple[str, ...] = (), **sections: dict) -> dict:
        result = runs.config_tree(task, task.parent / name, urls=urls)
        for changes in (TREE, sections):
            for section, settings in changes.items():
                result[section] = result.get(section, {}) | settings
        del result["data"]["eval"]
        return result

    return build


@pytest.fixture(scope="session")
def train(tree) -> Callable[..., Path]:
    """Train by the config of `tree`; return the run's directory."""

    def run(*arguments, **sections: dict) -> Path:
        config = tree(*arguments, **sections)
        directory = Path(config["run"]["dir"])
        runs.run("train", runs.write_config(config, directory.with_suffix(".yaml")))
        assert runs.steps_done(directory) == [1, 2]
        return directory

    return run


@pytest.fixture(scope="session")
def trained(served, task, train) -> Path:
    """A run in one process, with vLLM in fp32, and an evaluation of each kind before and after."""
    last_number = {"name": "regex", "settings": {"pattern": "[0-9]+"}}
    greedy = {"path": str(task / "heldout.jsonl"), "reward": last_number}
    sets = {"greedy": greedy, "sampled": greedy | {"n": 4, "temperature": 1.0, "top_p": 0.95}}
    return train("trained", (served().url,), eval={"sets": sets})
