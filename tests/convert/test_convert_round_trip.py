"""HF -> Megatron -> HF by the command line is bit-equal in every layout, and the Megatron side is Megatron's."""

import json
import re
import subprocess
import sys

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from dppo_megatron import hf
from dppo_megatron.hf.torch_dist_reader import TorchDistWeights
from tests.support.model_directories import edit_weights, same_weights, write_model
from tests.support.models import CONFIGS, EXPERT_FAMILIES
from tests.support.runs import environment

LAYOUTS = {
    "tp1": (),
    "tp2": ("--tensor", 2),
    "pp2": ("--pipeline", 2),
    "pp3": ("--pipeline", 3),  # four layers: stages of one and of two
    "ep2": ("--expert", 2),
    "tp2-pp2-ep2-etp1": ("--tensor", 2, "--pipeline", 2, "--expert", 2, "--expert-tensor", 1),
    "tp1-etp2": ("--expert-tensor", 2),
}
CASES = [
    (family, layout)
    for family in CONFIGS
    for layout in LAYOUTS
    if family in EXPERT_FAMILIES or ("ep2" not in layout and "etp" not in layout)
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_round_trip_is_bit_equal(models, tmp_path, convert, family, layout):
    source, there, back = models / family, tmp_path / "megatron", tmp_path / "hf"
    convert("hf-to-megatron", source, there, *LAYOUTS[layout])
    convert("megatron-to-hf", there, back, "--shard-gb", 2e-5)
    same_weights(source, back)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (back / name).read_text() == (source / name).read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"megatron", "hf"}


@pytest.mark.parametrize("stacked", [False, True])
def test_a_model_with_experts_in_every_layer_is_read_stacked_and_unstacked(
    models, tmp_path, convert, monkeypatch, stacked
):
    """The trainer's model does not stack them; one of Megatron-LM's with `moe_layer_freq` 1 does."""
    if stacked:
        monkeypatch.setattr("dppo_megatron.convert.to_megatron.stacks_layers", lambda config: True)
    convert("hf-to-megatron", models / "all_experts", tmp_path / "m", "--expert", 2)
    keys = FileSystemReader(tmp_path / "m").read_metadata().state_dict_metadata
    assert ("decoder.layers.mlp.experts.experts.linear_fc1.weight" in keys) == stacked
    convert("megatron-to-hf", tmp_path / "m", tmp_path / "hf")
    same_weights(models / "all_experts", tmp_path / "hf")


def test_every_rank_of_the_layout_has_its_file(models, tmp_path, convert):
    convert("hf-to-megatron", models / "qwen3_moe", tmp_path / "m", "--tensor", 2, "--pipeline", 2, "--expert", 2)
    contents: dict[str, set] = {}
    for index, stored in FileSystemReader(tmp_path / "m").read_metadata().storage_data.items():
        layer = re.match(r"decoder\.layers\.(\d)\.", index.fqn)
        what = ("expert", index.offset[0]) if ".experts." in index.fqn else ("layer", layer and int(layer.group(1)))
        contents.setdefault(stored.relative_path, set()).add(what)
    # Tensor 2, and experts over 2 x 2: four ranks in each of two stages; dense weights on the first two of them.
    assert len(contents) == 8
    for number in range(8):
        stage, rank = divmod(number, 4)
        content = contents[f"__{number}_0.distcp"]
        assert {n for kind, n in content if kind == "expert"} == ({0, 1} if rank < 2 else {2, 3})
        layers = {n for kind, n in content if kind == "layer"} - {None}
        assert layers == (({0, 1}, {2, 3})[stage] if rank < 2 else set())


def test_a_conversion_casts_every_tensor_but_the_score_correction_biases(models, tmp_path, convert):
    source = write_model(tmp_path / "fp32", CONFIGS["deepseek_v3"], dtype=torch.float32)
    convert("hf-to-megatron", source, tmp_path / "m", "--dtype", "bf16")
    convert("megatron-to-hf", tmp_path / "m", tmp_path / "hf")
    before, after = hf.SafetensorsDirectory(source), hf.SafetensorsDirectory(tmp_path / "hf")
    for name in before.tensors:
        dtype = torch.float32 if "e_score_correction_bias" in name else torch.bfloat16
        assert torch.equal(after.tensor(name), before.tensor(name).to(dtype)), name
    assert hf.read_hf_config(tmp_path / "hf").raw["dtype"] == "bfloat16"


def test_multi_token_prediction_layers_are_reported_as_left_out(tmp_path, convert):
    source = write_model(tmp_path / "source", {**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 1})
    edit_weights(source, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.ones(32, 64)}))
    report = "left out: 1 multi-token prediction layers"
    assert report in convert("hf-to-hf", source, tmp_path / "hf", "--dry-run")
    assert report in convert("hf-to-hf", source, tmp_path / "hf")
    assert report in convert("hf-to-megatron", source, tmp_path / "m")
    assert report in convert("megatron-to-hf", tmp_path / "m", tmp_path / "back", "--template", source)
    for written in ("hf", "m/model", "back"):
        assert json.loads((tmp_path / written / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert "model.layers.4.eh_proj.weight" not in hf.SafetensorsDirectory(tmp_path / "hf").tensors
    assert report not in convert("hf-to-hf", tmp_path / "hf", tmp_path / "again", "--dry-run")


@pytest.mark.parametrize("family", list(CONFIGS))
def test_dry_run_names_every_tensor_and_writes_nothing(models, tmp_path, convert, family):
    lines = convert("hf-to-megatron", models / family, tmp_path / "m", "--tensor", 2, "--dry-run").splitlines()
    names = {line.split(" ")[0] for line in lines[:-1]}
    assert names == set(hf.WeightMap(hf.read_hf_config(models / family)).hf_tensors())
    assert not list(tmp_path.iterdir())


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "tools/convert_hf_to_megatron.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["-m", "dppo_megatron", "convert", "hf-to-megatron"], ["--pipeline", "4", "--nproc", "2"]),
        (TORCHRUN, ["--tensor", "2"]),
    ],
    ids=["nproc", "torchrun"],
)
def test_several_processes_by_the_command_itself(models, tmp_path, command, options):
    arguments = [sys.executable, *command, str(models / "llama"), str(tmp_path / "m"), *options]
    subprocess.run(arguments, env=environment(), check=True, timeout=900)
    config = hf.read_hf_config(models / "llama")
    read, source = TorchDistWeights(tmp_path / "m", config), hf.SafetensorsDirectory(models / "llama")
    assert all(torch.equal(read.tensor(name), source.tensor(name)) for name in source.tensors)
    assert {p.name for p in tmp_path.iterdir()} == {"m"}
