"""--verify accepts differences within fp32 rounding and names the first layer that differs more."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from dppo_megatron.convert.job import convert as convert_in_process
from dppo_megatron.convert.layout import TargetLayout
from dppo_megatron.convert.to_hf import ToHF
from dppo_megatron.convert.to_megatron import ToMegatron
from tests.convert.scenarios import LLAMA3
from tests.support.actor_cases import YARN
from tests.support.model_directories import edit_weights, write_model
from tests.support.models import CONFIGS
from tests.support.runs import environment

FAMILIES = list(CONFIGS)


def change_layer_2(tensors: dict[str, torch.Tensor]) -> None:
    a, b = (f"model.layers.2.self_attn.{p}_proj.weight" for p in "kv")
    tensors[a], tensors[b] = tensors[b], tensors[a]  # the same shape: nothing but the logits shows it


pytestmark = pytest.mark.slow  # all read one comparison of many pairs


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Results of verify for many pairs, from one process, because starting one costs more than comparing."""
    root = tmp_path_factory.mktemp("verify")
    pairs: dict[str, tuple[Path, Path]] = {}
    for family in FAMILIES:
        # Logits of a few units: far from rounding at 1e-5, and far from those of another model.
        config = {**CONFIGS[family], "initializer_range": 0.15}
        config |= {"rope_parameters": LLAMA3} if family == "llama" else {}
        source = write_model(root / family, config, dtype=torch.float32)
        convert_in_process(partial(ToMegatron, source, root / f"{family}-m", TargetLayout(tensor=2, pipeline=2)))
        pairs[family] = source, root / f"{family}-m"
    kimi = {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "rope_parameters": {**YARN, "beta_fast": 1.0}}
    source = write_model(root / "kimi_k2", {**CONFIGS["deepseek_v3"], **kimi, "initializer_range": 0.15}, torch.float32)
    convert_in_process(partial(ToMegatron, source, root / "kimi_k2-m", TargetLayout(tensor=2, expert=2)))
    pairs["kimi_k2"] = source, root / "kimi_k2-m"
    padded = {**CONFIGS["llama"], "initializer_range": 0.15, "vocab_size": 4101, "num_hidden_layers": 1}
    source = write_model(root / "padded", padded, dtype=torch.float32)
    convert_in_process(partial(ToMegatron, source, root / "padded-m", TargetLayout(tensor=2)))
    pairs["padded vocabulary"] = source, root / "padded-m"
    source, checkpoint = pairs["qwen3"]
    convert_in_process(partial(ToMegatron, source, root / "narrow", TargetLayout(), torch.bfloat16))
    pairs["bf16 checkpoint of an fp32 directory"] = source, root / "narrow"
    convert_in_process(partial(ToHF, checkpoint, root / "half", source, torch.bfloat16))
    pairs["bf16 directory of an fp32 checkpoint"] = root / "half", checkpoint
    convert_in_process(partial(ToHF, checkpoint, root / "fp8", source, torch.bfloat16, "fp8_block"))
    pairs["fp8"] = root / "fp8", checkpoint
    wrong = Path(shutil.copytree(source, root / "wrong"))
    edit_weights(wrong, change_layer_2)
    pairs["wrong"] = wrong, checkpoint
    arguments = json.dumps([list(map(str, pair)) for pair in pairs.values()])
    done = subprocess.run(
        [sys.executable, "-m", "tests.convert.verify_pairs", arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=900,
    )
    lines = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]
    return dict(zip(pairs, lines, strict=True))


@pytest.mark.parametrize("family", [*FAMILIES, "kimi_k2", "padded vocabulary"])
def test_logits_of_a_converted_model_are_those_of_the_source(results, family):
    assert results[family]["differs_at"] is None
    assert results[family]["logits"] <= 1e-5
    assert results[family]["scale"] > 1
    assert results[family]["text"].startswith("verify: pass")


@pytest.mark.parametrize(
    "pair", ["bf16 checkpoint of an fp32 directory", "bf16 directory of an fp32 checkpoint", "fp8"]
)
def test_requested_rounding_is_no_difference(results, pair):
    assert results[pair]["differs_at"] is None, results[pair]


def test_the_first_layer_that_differs_is_named(results):
    assert results["wrong"]["differs_at"] == "layer 2"
    assert "FAIL" in results["wrong"]["text"]
    assert "layer 2" in results["wrong"]["text"]
