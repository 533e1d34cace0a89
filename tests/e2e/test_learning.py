"""Shortened examples learn: the quickstart's and the distillation's configs with fewer steps, on the shared engine."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from make_task import write_sums

from dppo_megatron.bank import BankReader
from dppo_megatron.report.doctor import diagnose
from dppo_megatron.types import Prompt, Rollout
from tests.support.faults import NOTICED_S, PROBES, Run, frozen
from tests.support.runs import Engine, records, run, write_config
from tests.support.teachers import check_scores

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
HELD_OUT, STEPS = 200, 6


def shortened(name: str, run_dir: Path, sums: Path, **changes: dict) -> dict:
    """The quickstart's config `name` on the sums in `sums`; `changes` are added section by section."""
    tree = yaml.safe_load((QUICKSTART / name).read_text())
    tree["run"]["dir"] = str(run_dir)
    for column, path in tree["data"].items():
        if str(path).endswith(".jsonl"):
            tree["data"][column] = str(sums / Path(path).name)
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return tree


@pytest.fixture(scope="module")
def careless(task, request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, Engine]:
    """The sums and warmup/model, raised on careless text while the engine starts; and that engine."""
    directory = tmp_path_factory.mktemp("careless")
    write_sums(directory, seed=1)
    heldout = directory / "heldout.jsonl"
    heldout.write_text("".join(heldout.read_text().splitlines(keepends=True)[:HELD_OUT]))
    warmup = shortened(
        "warmup.yaml",
        directory / "warmup",
        directory,
        model={"path": str(task / "random_model")},
        parallel={"world_size": 1, "tensor": 1},
        train={"steps": 120},
        optimizer={"decay": "constant"},
    )
    with ThreadPoolExecutor() as pool:
        warmed_up = pool.submit(run, "train", write_config(warmup, directory / "warmup.yaml"))
        engine = request.getfixturevalue("engine")
        warmed_up.result()
    return directory, engine


@pytest.mark.parametrize(
    "rollout",
    [{}, pytest.param({"top_p": 0.95, "top_k": 12}, marks=pytest.mark.slow)],
    ids=["whole", "truncated"],  # of fifteen tokens
)
def test_dppo_teaches_sums_to_a_policy_raised_on_careless_text(task, careless, tmp_path, rollout):
    start, engine = careless
    dppo = shortened(
        "config.yaml",
        tmp_path / "dppo",
        start,
        model={"path": str(start / "warmup" / "model")},
        rollout=rollout,
        train={"steps": STEPS},
        engine={"urls": [engine.url], "secret_file": str(task / "secret")},
        checkpoint={"every": 0},
        eval={"every": 0},
        tracking={"tensorboard": False},
    )
    run("train", write_config(dppo, tmp_path / "dppo.yaml"))

    assert diagnose(tmp_path / "dppo").findings == {}
    accuracy = {r["step"]: r["eval/accuracy"] for r in records(tmp_path / "dppo") if "eval/accuracy" in r}
    assert accuracy[0] < 0.5, accuracy
    assert accuracy[STEPS] > accuracy[0] + 0.25, accuracy


@pytest.mark.slow
def test_a_policy_raised_on_right_sums_teaches_it(task, careless, tmp_path):
    """In a quarter of the quickstart's 40 steps. The run serves the teacher; no reward is trained on.

    A second run adds the reward. Its teacher freezes, which costs neither groups nor accuracy.
    """
    start, engine = careless

    def raised(name: str, **changes: dict) -> Path:
        tree = shortened("warmup.yaml", tmp_path / name, start, parallel={"world_size": 1, "tensor": 1}, **changes)
        run("train", write_config(tree, tmp_path / f"{name}.yaml"))
        return tmp_path / name / "model"

    right = {"data": {"train": str(start / "train.jsonl")}, "optimizer": {"lr": 3e-3}, "train": {"steps": 300}}
    with ThreadPoolExecutor() as pool:
        teacher = pool.submit(raised, "teacher", model={"path": str(task / "random_model")}, **right)
        policy = raised("policy", model={"path": str(start / "warmup" / "model")}, train={"steps": 150})
        teacher = teacher.result()

    def distilled(name: str, **changes: dict) -> dict:
        return shortened(
            "../distill/config.yaml",
            tmp_path / name,
            start,
            **{
                "model": {"path": str(policy)},
                "distillation": {"teachers": {"carries": {"path": str(teacher)}}},
                "engine": {"urls": [engine.url], "secret_file": str(task / "secret")},
                "eval": {"every": 5},
                **changes,
            },
        )

    run("train", write_config(distilled("distill"), tmp_path / "distill.yaml"))
    found = records(tmp_path / "distill")
    accuracy = {r["step"]: r["eval/accuracy"] for r in found if "eval/accuracy" in r}
    assert accuracy[0] < 0.5, accuracy
    assert accuracy[10] >= 0.9, accuracy
    divergence = [r["distillation/divergence"] for r in found if "distillation/divergence" in r]
    assert divergence[-1] < 0.75 * divergence[0]
    assert {r["teacher/retried_requests"] for r in found if "teacher/carries/kl" in r} == {0}

    method = {"delta": 0.2, "distillation": "reverse_kl", "distillation_coefficient": 1.0}
    with_reward = {"name": "dppo_binary_tv", "settings": method}
    engine_settings = {"urls": [engine.url], "secret_file": str(task / "secret"), **PROBES}
    changes = {"objective": with_reward, "train": {"steps": 5}, "engine": engine_settings}
    both = Run(distilled("both", **changes), tmp_path)
    try:
        freeze_the_teacher(both)
        both.wait_to_end(120)
    finally:
        both.end()
    (reached,) = [r["eval/accuracy"] for r in records(both.dir) if r["step"] == 5 and "eval/accuracy" in r]
    assert reached >= accuracy[5] - 0.03, (reached, accuracy)  # 0.02 is the standard error of a difference at 95 %
    assert both.total("teacher/retried_requests") >= 1
    check_scores(list(samples(both, groups=5 * 64)), teacher)


def freeze_the_teacher(both: Run) -> None:
    """Its server is stopped for good. The command that started it kills it, and the launcher starts it again."""
    service = both.dir / "teachers" / "carries" / "services" / "engine-0.json"
    both.wait_for_step(1)
    with frozen(json.loads(service.read_text())["pid"]):
        started = time.monotonic()
        both.wait_for_log("teacher-carries", "health checks in a row failed", 60)
        assert time.monotonic() - started < 2 * NOTICED_S + 10
        both.wait_for_log("orchestrator", "distillation.teachers.carries: asked again, ", 30)
    both.wait_until(lambda: "teacher-carries serves again" in both.output.read_text(), "its second start", 120)


def samples(finished: Run, groups: int) -> Iterator[tuple[Prompt, Rollout]]:
    reader = BankReader(finished.dir / "bank")
    assert reader.refresh() == groups
    entries = reader.entries(0, groups)
    assert sorted(entry.position for entry in entries) == list(range(groups))
    for group in map(reader.read, entries):
        yield from ((group.prompt, rollout) for rollout in group.rollouts)
