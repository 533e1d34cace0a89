"""A rehearsal of the papers' experiments: their configs and options as shipped, with sizes, paths and layout of this
machine, on files of the published datasets' schemas and models that answer with a digit."""

import json
import math
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from dppo_megatron.bank import BankReader
from dppo_megatron.config import read_config
from tests.support.paper_models import DENSE, DIGITS, EXPERTS, make_model
from tests.support.runs import records, run, steps_done

pytestmark = pytest.mark.slow
PAPERS = Path(__file__).parents[2] / "examples/papers"
OPTIONS = dict(re.findall(r"^\| ([^|`]+) \| `(--set .*)` \|$", (PAPERS / "README.md").read_text(), re.MULTILINE))
TOPK, ASYNCHRONOUS = "DPPO, top-K TV", "asynchronous (not in the papers)"
LORA, R3 = "LoRA (in the paper with experts)", "R3, experts only"
STEPS, SAMPLED = 3, 12

# All changes of a rehearsal. Settings of other kinds stay as they are shipped.
SIZES = {
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 4,
    "rollout.max_response_tokens": 12,
    "train.steps": STEPS,
    "train.micro_batch_tokens": 1024,
    "engine.count": 1,
    "engine.max_model_len": 512,
    "engine.kv_cache_bytes": 1 << 26,
    "data.max_prompt_tokens": 400,
    "checkpoint.every": 2,
    "eval.every": 2,
    **{f"eval.sets.{name}.n": 8 for name in ("aime24", "aime25")},
    **{f"eval.sets.{name}.max_response_tokens": 12 for name in ("aime24", "aime25")},
}
PATHS = {"run.dir", "model.path", "data.train", "eval.sets.aime24.path", "eval.sets.aime25.path"}
LAYOUT = {
    "parallel.world_size": 2,
    "parallel.tensor": 1,
    "parallel.expert": 1,
    "parallel.sequence": False,
    "engine.tensor_parallel": 1,
    "slurm.gpu": None,
}


def arguments(changes: dict[str, object], options: tuple[str, ...] = ()) -> list[str]:
    allowed = PATHS | SIZES.keys() | LAYOUT.keys()
    assert changes.keys() <= allowed, changes.keys() - allowed
    out = [word for name in options for word in shlex.split(OPTIONS[name])]
    for key, value in changes.items():
        out += ["--set", f"{key}={json.dumps(value) if not isinstance(value, Path) else value}"]
    return out


def paths(home: Path, **others: Path) -> dict[str, Path]:
    chosen = {"eval.sets.aime24.path": home / "data/aime24.jsonl", "eval.sets.aime25.path": home / "data/aime25.jsonl"}
    return chosen | {name.replace("__", "."): path for name, path in others.items()}


def write_parquet(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """data/: output of `data prepare` for files of published schemas. A third of the problems cannot be solved."""
    home = tmp_path_factory.mktemp("papers")
    sums = [(number % 4, (number + 1) % 7) for number in range(SAMPLED)]
    math_rows = [
        {"problem": f"What is ${a}+{b}$? ({number})", "level": f"Level {1 + number % 5}", "type": "Algebra",
         "solution": rf"${a}+{b}$, which is $\boxed{{{DIGITS[a] if number % 3 else a + 57}}}$."}
        for number, (a, b) in enumerate(sums)
    ]  # fmt: skip
    dapo = [
        {"data_source": "math_dapo", "prompt": [{"content": f"Solve: {a}+{b} ({number})", "role": "user"}],
         "ability": "MATH", "reward_model": {"ground_truth": DIGITS[a], "style": "rule-lighteval/MATH_v2"},
         "extra_info": {"index": str(number)}}
        for number, (a, b) in enumerate(sums)
    ]  # fmt: skip
    aime24 = [{"ID": f"2024-I-{n}", "Problem": f"Find {n}.", "Solution": "s", "Answer": n % 4} for n in range(6)]
    aime25 = [{"problem": f"Find {n}.", "answer": str(n % 5)} for n in range(6)]
    for recipe, rows, name in (
        ("math", math_rows, "math"),
        ("dapo-math-17k", dapo * 3, "dapo-math-13k"),
        ("aime-2024", aime24, "aime24"),
        ("aime-2025", aime25, "aime25"),
    ):
        source = write_parquet(home / "published" / f"{name}.parquet", rows)
        said = run("data", "prepare", recipe, source, home / "data" / f"{name}.jsonl").stdout
        assert f"{SAMPLED if rows in (math_rows, dapo * 3) else 6} prompts of {len(rows)} rows" in said
    return home


def check_run(directory: Path, *, lag: int) -> None:
    """Every update of every step was made, by answers of allowed age, and both sets were answered eight times."""
    assert steps_done(directory) == list(range(1, STEPS + 1))
    found = records(directory)
    trained = [r for r in found if "time/step_s" in r]
    assert all(math.isfinite(r["train/grad_norm"]) for r in trained)
    assert any(r["train/grad_norm"] > 0 for r in trained)
    assert min(lag, 1) <= max(r["rollout/staleness_max"] for r in trained) <= lag
    assert 0 < max(r["rollout/reward_mean"] for r in trained) < 1
    for name in ("aime24", "aime25"):
        results = {r["step"]: r for r in found if f"eval/{name}/avg@8" in r}
        assert {0, STEPS} <= results.keys()
        for r in results.values():
            assert r[f"eval/{name}/prompts"] == 6
            assert 0 < r[f"eval/{name}/avg@8"] <= r[f"eval/{name}/pass@8"] <= 1
            assert r[f"eval/{name}/avg@8_stderr"] > 0
    reader = BankReader(directory / "bank")
    entries = list(reader.entries(0, reader.refresh()))
    assert len(entries) == STEPS * SIZES["rollout.prompts_per_step"]
    newest = reader.read(entries[-1])
    assert all(rollout.topk_ids.shape[1] == 20 for rollout in newest.rollouts)


def test_solvable_problems_are_measured_and_trained_on_behind_the_engines(home, tmp_path):
    """DPPO's sanity test: sample, filter, then top-K DPPO with a cap of 5 and answers of older policies."""
    config, model = PAPERS / "dppo_1.5b.yaml", make_model(tmp_path / "model", DENSE)
    own = SIZES | LAYOUT | paths(home, run__dir=tmp_path / "run", model__path=model)
    sampled = run("sample", config, "--n", "16", *arguments(own | {"data.train": home / "data/math.jsonl"}))
    assert f"{SAMPLED} prompts, {SAMPLED * 16} graded answers" in sampled.stdout
    solvable = tmp_path / "math-solvable.jsonl"
    run("data", "filter", "--bank", tmp_path / "run/samples/bank", "--pass-rate", "0.05:0.95", solvable)
    rows = [json.loads(line) for line in solvable.read_text().splitlines()]
    assert 4 <= len(rows) <= SAMPLED - 4
    assert all(row["answer"] in DIGITS and 0.05 <= row["pass_rate"] <= 0.95 for row in rows)
    own["data.train"] = solvable
    run("train", config, *arguments(own, (TOPK, ASYNCHRONOUS)))
    check_run(tmp_path / "run", lag=2)
    used = read_config(tmp_path / "run/config.yaml")
    assert (used.objective.name, used.rollout.topk_logprobs, used.train.updates_per_step) == ("dppo_topk_tv", 20, 4)
    assert used.objective.settings["ratio_cap"] == 5
    assert {one.top_p for one in used.eval_sets.values()} == {0.95}


def test_experts_with_lora_train_with_colocated_engines(home, tmp_path):
    """DPPO's LoRA setting with R3: adapters on experts, engines that share the trainer's devices, as shipped."""
    config, model = PAPERS / "dppo_30b_a3b.yaml", make_model(tmp_path / "model", EXPERTS)
    own = SIZES | LAYOUT | {"parallel.expert": 2}
    own |= paths(home, run__dir=tmp_path / "run", model__path=model, data__train=home / "data/dapo-math-13k.jsonl")
    run("train", config, *arguments(own, (TOPK, LORA, R3)))
    check_run(tmp_path / "run", lag=0)
    used = read_config(tmp_path / "run/config.yaml")
    assert (used.train.updates_per_step, used.model.lora.r, used.engine.placement) == (8, 32, "colocated")
    assert any(r.get("moe/routing_replay_disagreement", 0) > 0 for r in records(tmp_path / "run"))
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()
