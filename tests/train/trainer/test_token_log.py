"""Tokens of some sequences as the updates saw them: the same in every layout, and training does not notice."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dppo_megatron.bank import BankReader
from dppo_megatron.train.trainer.token_log import TokenLog
from tests.support.tiny_task import GROUPS, SAMPLES, STEPS, task_config
from tests.train.trainer.scenarios import train_cases

ALL = GROUPS * SAMPLES
LAYOUTS = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "context": {"context": 2}, "data": {}}


def stored(run: Path) -> dict[tuple[int, int, int], dict[str, np.ndarray]]:
    """(step, position, sample) -> its values by name, in the order of the tokens."""
    found: dict[tuple[int, int, int], list[dict[str, np.ndarray]]] = {}
    for path in sorted((run / "tokens").glob("*.safetensors")):
        file = load_file(path)
        ends = np.cumsum(file["counts"])
        for i, (position, sample) in enumerate(zip(file["position"], file["sample"], strict=True)):
            part = slice(ends[i] - file["counts"][i], ends[i])
            values = {name: file[name][part] for name in ("index", "logprob", "entropy", "divergence", "masked")}
            found.setdefault((int(path.name[5:11]), int(position), int(sample)), []).append(values)
    merged = {}
    for key, parts in found.items():
        values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(values["index"])
        merged[key] = {name: of[order] for name, of in values.items()}
    return merged


def case(directory: Path, count: int, **parallel) -> dict:
    return {"run": {"dir": str(directory)}, "tracking": {"token_sequences": count}, "parallel": parallel}


@pytest.mark.slow
def test_all_tokens_of_a_run_and_not_one_bit_of_its_weights_differs(ranks, task, tmp_path):
    cases = {name: case(tmp_path / name, n, world_size=1) for name, n in (("off", 0), ("some", 6), ("all", ALL))}
    (seen,) = ranks(1).run(train_cases, cases=cases, task=task, directory=tmp_path)
    for name in ("some", "all"):
        assert all(map(torch.equal, seen["off"]["weights"], seen[name]["weights"]))
    assert not (tmp_path / "off" / "tokens").exists()
    some, every = stored(tmp_path / "some"), stored(tmp_path / "all")
    assert len(some) == 6 * STEPS
    for key, values in some.items():
        for name, of in values.items():
            np.testing.assert_array_equal(of, every[key][name], f"{name} of {key}")

    reader = BankReader(task / "bank")
    entries = {e.position: e for e in reader.entries(0, reader.refresh())}
    rollouts = {position: reader.read(entry).rollouts for position, entry in entries.items()}
    for (step, position, sample), values in every.items():
        assert step == position // GROUPS + 1
        assert values["index"].tolist() == list(range(len(rollouts[position][sample].versions)))
    # The policy of the first update sampled the bank: log-probs are those of the engine.
    first = [
        (values["logprob"], rollouts[key[1]][key[2]].rollout_logprob) for key, values in every.items() if key[0] == 1
    ]
    near = [np.abs(trainer - engine).max() < 1e-4 for trainer, engine in first]
    assert len(near) / 2 <= sum(near) < len(near)
    for step, record in enumerate(seen["all"]["records"], 1):
        of_step = [values for key, values in every.items() if key[0] == step]
        assert sum(int(values["masked"].sum()) for values in of_step) == sum(record["masked_tokens"].values())
        entropy = np.concatenate([values["entropy"] for values in of_step]).mean()
        np.testing.assert_allclose(entropy, record["train/entropy"], rtol=1e-5)
        divergence = np.concatenate([values["divergence"] for values in of_step])
        np.testing.assert_allclose(divergence.mean(), record["policy/divergence_mean"], rtol=1e-5)
    assert any(values["masked"].any() for values in every.values())


@pytest.mark.slow
def test_the_same_in_every_layout(ranks, task, tmp_path):
    small = {"optimizer": {"lr": 1e-5}}  # with the task's own, rounding grows from update to update
    one = {"one": case(tmp_path / "one", ALL, world_size=1) | small}
    ranks(1).run(train_cases, cases=one, task=task, directory=tmp_path)
    cases = {name: case(tmp_path / name, ALL, world_size=2, **sizes) | small for name, sizes in LAYOUTS.items()}
    ranks(2).run(train_cases, cases=cases, task=task, directory=tmp_path)
    expected = stored(tmp_path / "one")
    for name in LAYOUTS:
        found = stored(tmp_path / name)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert found[key]["index"].tolist() == values["index"].tolist()
            for quantity in ("logprob", "entropy", "divergence"):
                np.testing.assert_allclose(found[key][quantity], values[quantity], atol=1e-3, err_msg=name)
    assert len(list((tmp_path / "tensor" / "tokens").iterdir())) == STEPS
    assert len(list((tmp_path / "context" / "tokens").iterdir())) == 2 * STEPS


def test_a_resumed_run_drops_the_steps_that_it_repeats(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    for step in (1, 2, 3):
        (tokens / f"step-{step:06d}-r001.safetensors").touch()
    (tokens / "step-notes.txt").touch()
    layout = SimpleNamespace(rank=0, tensor_rank=0, is_last_stage=True)
    TokenLog(task_config(tmp_path, run={"dir": str(tmp_path)}), layout, 2)
    left = {path.name for path in tokens.iterdir()}
    assert left == {"step-000001-r001.safetensors", "step-000002-r001.safetensors", "step-notes.txt"}
