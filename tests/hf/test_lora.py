"""Layers with adapters, their names, and the contents of an adapter's directory."""

import json
import math
from types import SimpleNamespace

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file

from dppo_megatron.config.model import LoraConfig
from dppo_megatron.hf import WeightMap, parse_hf_config
from dppo_megatron.hf.export import export_adapters
from dppo_megatron.hf.lora import Adapter, adapter_entry, target_problems
from dppo_megatron.hf.operations import QKV
from dppo_megatron.hf.peft import _config, _is_chosen, adapter_problems, adapter_shapes
from tests.support.actor_cases import DEEPSEEK, QWEN3, QWEN3_MOE
from tests.support.fakes.chunk import ranks

DENSE = parse_hf_config(QWEN3, "qwen3")
MOE = parse_hf_config(QWEN3_MOE, "qwen3_moe")
QWEN25_05B = {
    **{name: value for name, value in QWEN3.items() if name != "head_dim"},
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def qkv(targets: tuple[str, ...], r: int = 3):
    entry = WeightMap(DENSE).entry("decoder.layers.1.self_attention.linear_qkv.weight")
    return adapter_entry(entry, targets, r)


def test_names_are_those_of_peft():
    found = qkv(("q_proj", "v_proj"))
    prefix = "base_model.model.model.layers.1.self_attn"
    assert [t.name for t in found.a.hf] == [f"{prefix}.{p}_proj.lora_A.weight" for p in "qv"]
    assert {t.name: t.shape for t in found.b.hf} == {
        f"{prefix}.q_proj.lora_B.weight": (64, 3),
        f"{prefix}.v_proj.lora_B.weight": (32, 3),
    }
    assert qkv(("o_proj",)) is None


def test_targets_are_ends_of_names():
    assert len(qkv(("layers.1.self_attn.q_proj", "attn.k_proj")).a.hf) == 1
    assert qkv(("layers.2.self_attn.q_proj", "proj")) is None


@pytest.mark.parametrize("targets", [("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj"), ("k_proj",)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_row_of_a_fused_layer_meets_the_adapter_of_its_own(targets, size):
    """With more ranks (4) than groups of queries (2), Megatron cuts through a group."""
    found = qkv(targets)
    generator = torch.Generator().manual_seed(0)
    a = [torch.randn(t.shape, generator=generator) for t in found.a.hf]
    b = [torch.randn(t.shape, generator=generator) for t in found.b.hf]
    weight = torch.randn(128, 32, generator=generator)
    change = dict(zip([t.name.split(".")[6] for t in found.a.hf], map(torch.matmul, b, a), strict=True))
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    whole = QKV(4, 2, 16).to_shard([change.get(name, torch.zeros(n, 32)) for name, n in rows.items()], 0, 1)
    merged, shards = [], []
    for rank in range(size):
        part = weight.chunk(size)[rank]
        adapter = Adapter(found, part, scaling=0.5, rank=rank, size=size, seed=1)
        with torch.no_grad():
            adapter.A.copy_(found.a.op.to_shard(a, rank, size))
            adapter.B.copy_(found.b.op.to_shard(b, rank, size))
            merged.append(adapter.merged(part))
            shards.append(adapter.B.detach())
    torch.testing.assert_close(torch.cat(merged), weight + 0.5 * whole)
    assert all(map(torch.equal, found.b.op.from_shards(shards), b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("held", [torch.float32, None])
def test_a_folded_b_is_rounded_once(dtype, held):
    """(alpha / r) B, with a factor that is no power of two."""
    found = qkv(("q_proj",))
    adapter = Adapter(found, torch.zeros(128, 32, dtype=held or dtype), scaling=1 / 3, rank=0, size=1, seed=1)
    with torch.no_grad():
        adapter.B.copy_(torch.randn(adapter.B.shape, generator=torch.Generator().manual_seed(2)))
    chunk = torch.nn.Module()
    chunk.decoder = adapter
    exported = dict(export_adapters([chunk], DENSE, dtype, ranks=ranks(), folded=True))
    (b,) = (tensor for name, tensor in exported.items() if ".lora_B." in name)
    (whole,) = found.b.op.from_shards([adapter.B.detach()])
    assert torch.equal(b, (whole.double() / 3).to(dtype))
    assert held is None or not torch.equal(b, (whole.to(dtype).double() / 3).to(dtype)), "rounding twice shows"
    (a,) = (tensor for name, tensor in exported.items() if ".lora_A." in name)
    assert torch.equal(a, adapter.A.to(dtype))


def test_adapters_start_alike_in_every_layout_and_change_nothing():
    found = qkv(("q_proj", "v_proj"))
    one, other = (
        Adapter(found, torch.zeros(128 // size, 32), scaling=1, rank=size - 1, size=size, seed=5) for size in (1, 2)
    )
    assert torch.equal(one.A, other.A)
    assert 0.9 / math.sqrt(32) < float(one.A.detach().abs().max()) <= 1 / math.sqrt(32)
    assert not one.merged(torch.zeros(128, 32)).any()
    q, v = one.A.detach().chunk(2)
    assert not torch.equal(q, v)  # each target draws its own
    assert not torch.equal(one.A, Adapter(found, torch.zeros(128, 32), scaling=1, rank=0, size=1, seed=6).A)


@pytest.mark.parametrize(
    ("model", "targets", "told"),
    [
        (QWEN3, ("qproj",), "qproj names no linear layer of Qwen3ForCausalLM; it has down_proj, gate_proj, k_proj"),
        (QWEN3_MOE, ("q_proj", "gate"), "gate names no linear layer"),
        (QWEN3, ("lm_head",), "lm_head names no linear layer"),
        (QWEN3, ("input_layernorm",), "input_layernorm names no linear layer"),
        (QWEN3, ("layers.1.self_attn.q_proj",), "no adapter in layers 0, 2, 3; every layer needs one"),
        (DEEPSEEK, ("q_proj",), "it has down_proj, gate_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, q_a_proj"),
    ],
)
def test_wrong_targets_are_refused(model, targets, told):
    (problem,) = target_problems(WeightMap(parse_hf_config(model, "x")), targets)
    assert told in problem


def test_every_expert_has_its_own():
    shapes = adapter_shapes(parse_hf_config(QWEN3_MOE, "x"), LoraConfig(r=2, targets=("gate_proj",)))
    assert len(shapes) == 2 * (1 + 3 * 8)  # a dense layer, and eight experts in three
    assert shapes["base_model.model.model.layers.3.mlp.experts.7.gate_proj.lora_B.weight"] == (24, 2)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("targets", "parameters", "largest"),
    [
        (None, 549_888, 8),  # every projection
        (("gate_proj", "up_proj", "down_proj"), 414_720, 11),
        ((*ATTENTION, "down_proj"), 273_408, 18),
        (ATTENTION, 135_168, 36),
        (("q_proj", "v_proj"), 67_584, 73),
    ],
)
def test_up_to_which_r_an_adapter_is_a_hundredth_of_a_small_model(targets, parameters, largest):
    """Both are published in engine.dtype, so of the bytes too. At r = 16 with every projection it is 1.8 %."""
    hf = parse_hf_config(QWEN25_05B, "Qwen2.5-0.5B")
    whole = sum(map(math.prod, WeightMap(hf).hf_tensors().values()))
    assert whole == 494_032_768
    for r in (largest, largest + 1):
        lora = LoraConfig(r=r) if targets is None else LoraConfig(r=r, targets=targets)
        adapter = sum(map(math.prod, adapter_shapes(hf, lora).values()))
        assert adapter == r * parameters
        assert (adapter <= 0.01 * whole) == (r == largest)


GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}
LORA = LoraConfig(r=2, alpha=4, targets=("q_proj",))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"r": 4}, "r = 4, model.lora.r = 2; use the same"),
        ({"lora_alpha": 8}, "lora_alpha = 8, model.lora.alpha = 4; use the same"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported, only 'LORA'"),
        ({"peft_type": None}, "peft_type = None"),
        *(
            ({key: value}, f"{key} = {value!r} is not supported")
            for key, values in {
                "init_lora_weights": ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"),
                "target_parameters": (["mlp.experts.gate_up_proj"],),
                "rank_pattern": ({"q_proj": 8},),
                "alpha_pattern": ({"q_proj": 8},),
                "kasa_config": ({}, {"beta": 1e-4}),  # PEFT turns KaSA on in both
                "bias": ("all", "lora_only"),
                "task_type": ("SEQ_CLS",),
                "layer_replication": ([[0, 2], [1, 2]],),
                **dict.fromkeys(("use_rslora", "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out"), (True,)),
                **dict.fromkeys(("alora_invocation_tokens", "trainable_token_indices", "modules_to_save"), ([1],)),
                **dict.fromkeys(("use_bdlora", "arrow_config", "velora_config", "monteclora_config"), ({"n": 2},)),
                "of_a_later_peft": (True, 1, "x", {}),
            }.items()
            for value in values
        ),
        *(
            (changes, None)
            for changes in (
                *({"init_lora_weights": init} for init in (True, False, "gaussian", "orthogonal", "eva", "mica")),
                {"target_modules": "all-linear"},
                {"target_modules": r".*\.[qk]_proj", "exclude_modules": ["k_proj"]},
                {"layers_to_transform": [0, 1, 2, 3], "layers_pattern": "layers"},
                *({"layers_to_transform": layers} for layers in ([3, 2, 1, 0], [0, 0, 1, 2, 3], list(range(36)))),
                {"lora_dropout": 0.1, "eva_config": {"rho": 2.0}, "loftq_config": {}, "of_a_later_peft": None},
            )
        ),
        *(
            (changes, "leaves out base_model.model.model.layers.")
            for changes in (
                {"target_modules": None},
                {"target_modules": r".*\.1\..*q_proj"},
                {"exclude_modules": ["q_proj"]},
                {"layers_to_transform": [1]},
                *({"layers_to_transform": layers} for layers in (0, True, 1.5, ["0", "1"], [[0, 1, 2, 3]])),
                *({key: value} for key in ("target_modules", "exclude_modules") for value in (5, True, "(")),
            )
        ),
    ],
)
def test_an_adapter_that_means_something_else_is_refused(tmp_path, changes, told):
    save_file({name: torch.zeros(shape) for name, shape in adapter_shapes(DENSE, LORA).items()},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(GOOD | changes))
    problems = adapter_problems(tmp_path, DENSE, LORA)
    assert len(problems) == (told is not None)
    assert told is None or told in problems[0]


@pytest.mark.parametrize("pattern", [None, [], "layers", ["layers"]])
@pytest.mark.parametrize("layers", [None, [], [*range(MOE.num_layers)], [*range(8)], [0], [1, 5], 1])
def test_the_number_of_an_expert_is_no_layer(pattern, layers):
    """PEFT before 0.21 took the last number of a name, which is the expert's."""
    lora = LoraConfig(r=2, alpha=4, targets=("q_proj", "down_proj"))
    saved = {"layers_to_transform": layers, "layers_pattern": pattern, "target_modules": [*lora.targets]}
    config = SimpleNamespace(**saved)
    names = adapter_shapes(MOE, lora)
    assert any(".experts.5." in name for name in names)
    layer_names = {name: name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}
    adapted = {name: check_target_module_exists(config, layer) for name, layer in layer_names.items()}
    assert all(adapted.values()) == all(_is_chosen(name, saved, MOE.num_layers) for name in names)


def test_defaults_of_peft_and_written_adapters_are_accepted(tmp_path):
    save_file({name: torch.zeros(shape) for name, shape in adapter_shapes(DENSE, LORA).items()},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]).save_pretrained(tmp_path)
    assert adapter_problems(tmp_path, DENSE, LORA) == []
    (tmp_path / "adapter_config.json").write_text(json.dumps(_config(LORA, "base")))
    assert adapter_problems(tmp_path, DENSE, LORA) == []


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_an_adapter_of_integers_is_refused(tmp_path, dtype):
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in adapter_shapes(DENSE, LORA).items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(GOOD))
    problems = adapter_problems(tmp_path, DENSE, LORA)
    assert len(problems) == len(tensors)
    assert f"{dtype}, expected floating-point numbers" in problems[0]


def test_an_adapter_of_other_layers_is_refused_tensor_by_tensor(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        (problem,) = adapter_problems(path, DENSE, LORA)
        assert "No such file or directory; name the directory with adapter_config.json and adapter_model" in problem
    (tmp_path / "adapter_config.json").write_text(json.dumps(GOOD))
    other = adapter_shapes(DENSE, LoraConfig(r=2, targets=("k_proj",)))
    save_file({name: torch.zeros(shape) for name, shape in other.items()}, tmp_path / "adapter_model.safetensors")
    problems = adapter_problems(tmp_path, DENSE, LORA)
    assert len(problems) == 4 * len(other) // 2
    assert any("q_proj.lora_A.weight: missing" in problem for problem in problems)
    assert any("k_proj.lora_B.weight: unexpected" in problem for problem in problems)
