"""The precisions that a machine can compute, and the libraries that compute them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dppo_megatron.hf import read_hf_config
from dppo_megatron.run.checks import settings_problems
from dppo_megatron.train.actor import check_model, megatron_version, model, model_config
from dppo_megatron.train.actor.batch.packing import Packer
from dppo_megatron.train.actor.precision import capability_problems, implementations, precision_arguments
from tests.support.actor_cases import actor_config, pack, sequences, write_config

BF16 = {"dtype": "bf16"}


@pytest.mark.parametrize(
    ("settings", "capability", "expected"),
    [
        ({**BF16, "fp8": "tensorwise"}, (8, 9), None),
        ({**BF16, "fp8": "blockwise"}, (9, 0), None),
        ({**BF16, "fp8": "mxfp8"}, (10, 0), None),
        ({**BF16, "fp8": "tensorwise"}, None, "model.fp8 = tensorwise: needs a CUDA device; set it to none"),
        ({**BF16, "fp8": "tensorwise"}, (8, 0), "needs compute capability 8.9 or newer, the GPU has 8.0; set it to"),
        ({**BF16, "fp8": "blockwise"}, (8, 9), "needs compute capability 9.0 or newer, the GPU has 8.9; use one of"),
        ({**BF16, "fp8": "mxfp8"}, (9, 0), "the GPU has 9.0; use one of tensorwise, blockwise or none"),
    ],
)
def test_an_fp8_recipe_is_refused_below_its_compute_capability(settings, capability, expected):
    problems = capability_problems(actor_config(Path("unused"), **settings), capability)
    assert problems == [] if expected is None else any(expected in problem for problem in problems), problems


def test_fp8_is_refused_without_a_cuda_device(tmp_path):
    config = actor_config(write_config(tmp_path), **BF16, fp8="blockwise")
    assert check_model(config) == ["model.fp8 = blockwise: needs a CUDA device; set it to none"]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_megatron_knows_the_recipes(recipe):
    from megatron.core.enums import Fp8Recipe

    arguments = precision_arguments(actor_config(Path("unused"), **BF16, fp8=recipe))
    assert arguments["fp8_recipe"] in list(Fp8Recipe)
    assert arguments["fp8"] in ("e4m3", "hybrid")


@pytest.mark.parametrize(("recipe", "rows"), [("none", 1), ("tensorwise", 16), ("blockwise", 16), ("mxfp8", 32)])
def test_the_number_of_packed_rows_is_a_multiple_of_the_fp8_tile_on_every_rank(tmp_path, recipe, rows):
    """Every sequence-parallel rank has a multiple of the tile's rows."""
    config = actor_config(write_config(tmp_path), **BF16, fp8=recipe)
    layout = SimpleNamespace(
        device=torch.device("cpu"), tensor_size=2, tensor_rank=0, sequence_parallel=True, context_rank=0,
        context_size=1, pipeline_size=1, virtual_pipeline_size=None, expert_group=None,
    )  # fmt: skip
    packer = Packer.build(read_hf_config(tmp_path), config, layout, None)
    assert packer(pack(sequences(3))).token_ids.shape[1] % (2 * rows) == 0
    assert packer.multiple == 2 * rows


def chosen(transformer_engine_layers=False):
    return implementations(transformer_engine_layers=transformer_engine_layers)


def test_apex_of_the_package_index_is_not_nvidias(tmp_path, monkeypatch):
    """The package index has a web toolkit; NVIDIA's package has compiled modules."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(megatron_version, "has_transformer_engine", lambda: False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('a web toolkit')")
    assert "Adam torch," in chosen()
    (tmp_path / "amp_C.py").touch()
    sys.path_importer_cache.clear()
    assert "Adam NVIDIA apex, gradient norm NVIDIA apex," in chosen()
    monkeypatch.setattr(megatron_version, "has_transformer_engine", lambda: True)
    assert "Adam TransformerEngine," in chosen()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "Adam torch," in chosen()


@pytest.mark.slow
def test_megatron_is_imported_without_wandb_which_can_be_imported_after_it():
    """Importing it would take a second of every process."""
    code = "import sys, dppo_megatron.train.actor; assert 'wandb' not in sys.modules; import wandb; wandb.init"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kernel", [False, True])
def test_the_log_names_the_weight_gradient_kernel_that_is_set_for_megatron(kernel, tmp_path, monkeypatch):
    """The setting is Megatron's own layers'; TransformerEngine's need no apex."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(megatron_version, "has_fused_weight_gradient", lambda: kernel)
    hf, config = read_hf_config(write_config(tmp_path)), actor_config(tmp_path, dtype="bf16")
    found = model_config._precision_arguments(hf, config)["gradient_accumulation_fusion"]
    assert found == kernel
    assert chosen(False).endswith("weight gradients " + ("NVIDIA apex" if kernel else "torch"))
    assert chosen(True).endswith("weight gradients TransformerEngine")


@pytest.mark.parametrize("engine", [False, True])
def test_layers_of_transformer_engine_accumulate_weight_gradients_themselves(engine, tmp_path, monkeypatch):
    """Megatron's setting for all layers is false if its head does not support it."""
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))])
    layers[0].fuse_wgrad_accumulation = layers[1][0].fuse_wgrad_accumulation = False
    monkeypatch.setattr(model, "PolicyModel", lambda **_: SimpleNamespace(decoder=layers))
    monkeypatch.setattr(model, "use_transformer_engine", lambda config: engine)
    monkeypatch.setattr(model, "_use_own_modules", lambda *_: None)
    monkeypatch.setattr(megatron_version, "block_spec", lambda *_: None)
    hf, config = read_hf_config(write_config(tmp_path)), actor_config(tmp_path, dtype="bf16")
    model._chunk(hf, config, SimpleNamespace(tensor_size=1), None, True, True, None)
    assert layers[0].fuse_wgrad_accumulation is layers[1][0].fuse_wgrad_accumulation is engine
    assert not hasattr(layers[1], "fuse_wgrad_accumulation")


def test_fp32_with_transformer_engine_has_no_attention_and_is_refused(tmp_path, monkeypatch):
    explicit = actor_config(tmp_path, dtype="fp32", layers="transformer_engine")
    assert any(p.startswith("model.dtype = fp32: TransformerEngine") for p in settings_problems(explicit))
    config = actor_config(write_config(tmp_path), dtype="fp32")
    assert not settings_problems(config)
    assert not check_model(config)
    monkeypatch.setattr(model_config, "use_transformer_engine", lambda config: True)
    assert any("which model.layers = auto means here" in p for p in check_model(config))
    assert not check_model(actor_config(tmp_path, dtype="bf16"))
