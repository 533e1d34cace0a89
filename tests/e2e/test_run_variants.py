"""Whole runs with other ways to move weights, to sample and to compute. A run has several of them where they do not
depend on each other."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open

from dppo_megatron.bank import BankReader
from dppo_megatron.data.tokenizer import load_tokenizer
from tests.support import runs
from tests.support.audit import audit
from tests.support.teachers import check_scores

pytestmark = pytest.mark.engines
SOURCES = ("sums", "sums with help")
TOPK = {"name": "dppo_topk_tv", "settings": {"delta": 0.2}}
BF16 = {"engine": {"dtype": "bf16"}, "weight_sync": {"probe_tolerance": 0.3}, "rollout": {"max_mismatch_kl": 0.1}}
# Log-probs of the engine and of the trainer, by the engine's dtype: rounded to 16 bits they cannot be equal.
DIFFERENCE = {"fp32": (0, 1e-4), "fp16": (1e-4, 0.02), "bf16": (1e-3, 0.3)}
VARIANTS = {
    "asynchronous": {
        "weight_sync": {"transport": "broadcast"},
        "rollout": {"max_staleness": 2, "on_update": "abort", "beyond_bound": "drop"},
    },
    # With broadcasts it is `exact_sglang` below; not colocated, it runs in tests/faults.
    "colocated_sglang": {
        "engine": {"placement": "colocated", "kind": "sglang"},
        "rollout": {"topk_logprobs": 4},
        "objective": TOPK,
    },
    "lora_truncated": {
        "model": {"lora": {"r": 4}},
        "weight_sync": {"transport": "broadcast"},
        "rollout": {"top_p": 0.95, "top_k": 9, "min_p": 0.01, "topk_logprobs": 4},
        "objective": TOPK,
    },
    "lora_adapter": {
        "model": {"lora": {"r": 4, "targets": ["q_proj", "v_proj", "down_proj"]}},
        "weight_sync": {"lora": "adapter"},
    },
    # Both as all examples for GPUs have it, and an exact trainer with engines as they are there.
    "bf16": {"model": {"dtype": "bf16"}, **BF16},
    "bf16_engine": BF16,
    "colocated_fp16": {
        "model": {"dtype": "fp16"},
        "engine": {"placement": "colocated", "dtype": "fp16"},
        "weight_sync": {"probe_tolerance": 0.05},
        "rollout": {"max_mismatch_kl": 1e-3},
    },
    "turns": {
        "rollout": {"max_response_tokens": 40, "stop_token_ids": [2, 3, 4, 5, 6], "max_staleness": 1},
        "environment": {"name": "tests.rollout.environments.worlds:Unscored", "settings": {"turns": 3}, "workers": 4},
    },
    # Without a differing bit, rounded to 16 bits by two ranks, and with the engine's top K.
    "exact": {"model": {"dtype": "bf16"}, "engine": {"dtype": "bf16", "exact": True}},
    "exact_sglang": {
        "parallel": {"world_size": 1, "tensor": 1},
        "engine": {"kind": "sglang", "exact": True},
        "weight_sync": {"transport": "broadcast"},
        "rollout": {"topk_logprobs": 4, "temperature": 0.9},
        "objective": TOPK,
    },
}
SMOKE = "colocated_sglang"  # runs in every shard
# Variants without special server settings share one; the others start theirs, as runs do.
SHARED = {
    **dict.fromkeys(("asynchronous", "lora_truncated", "turns"), "engine"),
    **dict.fromkeys(("bf16", "bf16_engine"), "engine_in_bf16"),
}


@pytest.fixture(scope="module")
def engine_in_bf16(task, tmp_path_factory):
    server = runs.start_engine(task, tmp_path_factory.mktemp("bf16_engine"), dtype="bf16")
    yield server
    server.end()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke if name == SMOKE else ()) for name in VARIANTS]
)
def test_a_run_trains_to_its_end(task, tmp_path, request, name):
    urls = (request.getfixturevalue(SHARED[name]).url,) if name in SHARED else ()
    tree = runs.config_tree(task, tmp_path / "run", urls=urls)
    for section, settings in VARIANTS[name].items():
        tree[section] = tree.get(section, {}) | settings
    trained = runs.train_to_end(tree)
    assert all(("train/loss_scale" in r) == (tree["model"]["dtype"] == "fp16") for r in trained)
    lag = max(r["rollout/staleness_max"] for r in trained)
    assert lag <= tree["rollout"].get("max_staleness", 0)
    least, most = DIFFERENCE[tree["engine"]["dtype"]]
    if tree["engine"].get("exact"):
        least, most = 0, 1e-30
        assert {r["mismatch/kl"] for r in trained} == {0}
    assert all(least <= r["probe/max_abs_logprob_difference"] < most for r in trained)
    fresh = [r["mismatch/max_abs_logprob_difference"] for r in trained if r["rollout/staleness_max"] == 0]
    assert fresh
    assert all(least <= difference < most for difference in fresh)
    (trained_model,) = (tmp_path / "run" / "model").glob("*.safetensors")
    with safe_open(trained_model, framework="np") as file:
        stored = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert stored == {{"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[tree["model"]["dtype"]]}
    reader = BankReader(tmp_path / "run" / "bank")
    assert reader.refresh() == runs.STEPS * runs.GROUPS
    entries = list(reader.entries(0, runs.STEPS * runs.GROUPS))
    assert all("abort" not in entry.finish_reasons for entry in entries)
    if name == "turns":
        found = runs.records(tmp_path / "run")
        assert all(1 <= r["environment/turns_mean"] <= 3 for r in found if "environment/turns_mean" in r)
        assert {r["step"] for r in found if "eval/accuracy" in r} >= {0, runs.STEPS}
        checked = audit(map(reader.read, entries))
        assert checked.problems == []
        assert checked.counts["turns"] > checked.counts["trajectories"] == runs.STEPS * runs.GROUPS * runs.SAMPLES
        tokens = sum(r["rollout/response_tokens_mean"] for r in trained) * runs.GROUPS * runs.SAMPLES
        assert tokens == pytest.approx(checked.counts["policy tokens"])


def test_each_data_source_has_its_teacher(task, engine, tmp_path):
    """Both are the policy itself: one with the same prompt, the other reads the answer, too."""
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row | {"data_source": SOURCES[i % 2]}) + "\n" for i, row in enumerate(rows))
    (tmp_path / "train.jsonl").write_text(text)
    teachers = {
        "same": {"prompt_template": "{prompt}", "sources": [SOURCES[0]]},
        "helped": {"prompt_template": "{answer}={prompt}", "sources": [SOURCES[1]]},
    }
    tree = runs.config_tree(task, tmp_path / "run", urls=(engine.url,))
    tree["data"]["train"] = str(tmp_path / "train.jsonl")
    tree["distillation"] = {"topk": 5, "teachers": teachers}
    tree["objective"]["settings"] |= {"distillation": "forward_kl", "distillation_coefficient": 0.5}
    runs.run("train", runs.write_config(tree, tmp_path / "c.yaml"))
    assert runs.steps_done(tmp_path / "run") == list(range(1, runs.STEPS + 1))
    reader, helped = BankReader(tmp_path / "run" / "bank"), []
    assert reader.refresh() == runs.STEPS * runs.GROUPS
    tokenizer = load_tokenizer(task / "random_model")
    for number, entry in enumerate(reader.entries(0, runs.STEPS * runs.GROUPS)):
        group = reader.read(entry)
        gaps = np.concatenate([r.teacher_logprob - r.rollout_logprob for r in group.rollouts])
        source = SOURCES[group.prompt.row % 2]
        assert (np.abs(gaps).max() < 1e-4) == (source == SOURCES[0])
        if source == SOURCES[1] and number < runs.GROUPS:  # sampled by the start policy
            ids = tokenizer.encode(f"{group.prompt.answer}={group.prompt.text}", add_special_tokens=False)
            helped += [(replace(group.prompt, token_ids=np.array(ids)), rollout) for rollout in group.rollouts]
    assert helped
    check_scores(helped, task / "random_model")
    last = [r for r in runs.records(tmp_path / "run") if "teacher/helped/kl" in r][-1]
    assert abs(last["teacher/same/kl"]) < 1e-4 < last["teacher/helped/kl"]


def test_a_mismatch_beyond_the_limit_ends_the_run(task, engine_in_bf16, tmp_path):
    tree = runs.config_tree(task, tmp_path / "run", urls=(engine_in_bf16.url,))
    tree["engine"]["dtype"] = "bf16"
    tree["weight_sync"] = {"probe_tolerance": 0.3}
    tree["rollout"]["max_mismatch_kl"] = 1e-9
    result = runs.run("train", runs.write_config(tree, tmp_path / "c.yaml"), check=False)
    assert result.returncode == 1
    assert "rollout.max_mismatch_kl = 1e-09" in result.stdout
    assert runs.steps_done(tmp_path / "run") == []
