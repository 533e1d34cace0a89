"""The settings read from config.json, and every reason to reject it."""

import json

import pytest

from dppo_megatron import hf
from tests.support.models import CONFIGS

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def problems_of(raw) -> tuple[str, ...]:
    with pytest.raises(hf.ModelError) as error:
        hf.parse_hf_config(raw)
    return error.value.problems


def test_rotary_settings_of_both_transformers_generations():
    base = {k: v for k, v in CONFIGS["llama"].items() if k != "rope_theta"}
    llama3 = {"rope_type": "llama3", **LLAMA3}
    old = hf.parse_hf_config({**base, "rope_theta": 5e5, "rope_scaling": llama3})
    new = hf.parse_hf_config({**base, "rope_parameters": {"rope_theta": 5e5, **llama3}})
    assert (old.rope_theta, old.rope_type) == (5e5, "llama3")
    assert dict(old.rope_scaling) == LLAMA3
    for name in ("rope_theta", "rope_type", "rope_scaling"):
        assert getattr(old, name) == getattr(new, name)
    assert hf.parse_hf_config({**base, "rope_scaling": None}).rope_theta == 10000.0
    both = hf.parse_hf_config({**base, "rope_theta": 5e5, "rope_scaling": llama3, "rope_parameters": llama3})
    assert both.identity() == old.identity()


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "llama3", **LLAMA3}},
         ["rope_scaling and rope_parameters: they differ"]),
        ("llama", {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "default"}},
         ["rope_scaling and rope_parameters: they differ"]),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
         ["rope_parameters: settings for kinds of layers (full_attention) are not supported"]),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 0}},
         ["rope_scaling.low_freq_factor: missing", "rope_scaling.high_freq_factor = 0: must be above 0",
          "rope_scaling.original_max_position_embeddings: missing"]),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "mscale": "1"}},
         ["rope_scaling.factor: missing", "rope_scaling.mscale = '1': must be int or float"]),
        ("llama", {"rope_parameters": {"rope_theta": "x"}},
         ["rope_parameters.rope_theta = 'x': must be int or float"]),
        ("llama", {"rope_theta": -1}, ["rope_theta = -1: must be above 0"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5: not supported"]),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.25}},
         ["partial_rotary_factor and rope_parameters.partial_rotary_factor: they differ"]),
        ("glm4_moe", {"partial_rotary_factor": 0.45}, ["partial_rotary_factor = 0.45: rotates 7 of 16 dimensions"]),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor = 1.5: more than any model has"]),
    ],
)  # fmt: skip
def test_rotary_settings_that_cannot_be_meant(family, changes, expected):
    found = problems_of({**CONFIGS[family], **changes})
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))


def test_families_differ_where_they_should():
    configs = {family: hf.parse_hf_config(raw) for family, raw in CONFIGS.items()}
    assert {f for f, c in configs.items() if c.qkv_bias} == {"qwen2", "glm4_moe", "gpt_oss"}
    assert {f for f, c in configs.items() if c.qk_norm} == {
        "qwen3",
        "qwen3_moe",
        "glm4_moe",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    }
    assert {f: c.rotary_dim for f, c in configs.items() if c.rotary_dim != c.head_dim} == {
        **dict.fromkeys(("glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_5_text", "qwen3_5_moe_text"), 8)
    }  # fmt: skip
    assert configs["qwen2"].head_dim == 8  # derived
    assert configs["qwen3_moe"].moe.layers == (False, True, True, True)
    assert configs["deepseek_v3"].moe.shared_ffn_hidden_size == 48
    assert configs["deepseek_v3"].head_dim == 16


def test_settings_of_glm_that_its_config_decides():
    raw = {k: v for k, v in CONFIGS["glm4_moe"].items() if k not in ("partial_rotary_factor", "rms_norm_eps")}
    config = hf.parse_hf_config({**raw, "attention_bias": False, "use_qk_norm": False})
    assert (config.qkv_bias, config.qk_norm) == (False, False)
    assert (config.partial_rotary_factor, config.rms_norm_eps) == (0.5, 1e-5)  # defaults of transformers and vLLM
    new = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}}
    assert hf.parse_hf_config({**raw, **new}).rotary_dim == 4


def test_readers_agree_on_the_dense_layers_of_glm_flash():
    raw = CONFIGS["glm4_moe_lite"]
    kinds = ["dense", "dense", "sparse", "sparse"]
    two = hf.parse_hf_config({**raw, "first_k_dense_replace": 2, "mlp_layer_types": kinds})
    assert two.moe.layers == (False, False, True, True)
    for changes in ({"first_k_dense_replace": 2}, {"mlp_layer_types": kinds}):
        (problem,) = problems_of({**raw, **changes})
        assert problem.startswith("first_k_dense_replace = ")


def test_layers_of_qwen3_5():
    raw = CONFIGS["qwen3_5_text"]
    assert hf.parse_hf_config(raw).attention_layers == (1, 3)
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    assert hf.parse_hf_config({**raw, "layer_types": kinds}).attention_layers == (1, 2)
    changes = {"layer_types": [*kinds, "sliding_attention"], "linear_num_value_heads": 6, "output_gate_type": "sigmoid",
               "attn_output_gate": False}  # fmt: skip
    found = problems_of({**raw, **changes})
    assert [line.split(":")[0] for line in found] == [
        "layer_types", "layer_types", "linear_num_value_heads = 6", "output_gate_type = 'sigmoid'",
        "attn_output_gate = False",
    ]  # fmt: skip


def test_a_window_of_mistral_is_refused():
    raw = {name: value for name, value in CONFIGS["mistral"].items() if name != "sliding_window"}
    assert problems_of(raw) == ("sliding_window: missing; write null where the model has none",)
    (problem,) = problems_of({**raw, "sliding_window": 4096})
    assert problem == "sliding_window = 4096: sliding-window attention is not supported"


def test_layers_of_gpt_oss():
    config = hf.parse_hf_config(CONFIGS["gpt_oss"])
    assert (config.sinks.window, config.sinks.layers) == (5, (True, False, True, False))
    changes = {"layer_types": ["full_attention", "chunked_attention"], "swiglu_alpha": 1.0, "rope_parameters": None}
    assert set(problems_of({**CONFIGS["gpt_oss"], **changes})) == {
        "layer_types: 2 entries for num_hidden_layers = 4",
        "layer_types: chunked_attention not supported; only sliding_attention, full_attention",
        "swiglu_alpha = 1.0: only 1.702 is supported",
        "rope_parameters: missing",
    }


def test_kimi_k2_is_read_as_deepseek_v3():
    config = hf.parse_hf_config({**CONFIGS["deepseek_v3"], "model_type": "kimi_k2", "n_group": 1, "topk_group": 1})
    assert (config.family, config.moe.num_groups) == ("deepseek_v3", 1)


def test_end_of_sequence_may_be_one_or_several():
    assert hf.parse_hf_config({**CONFIGS["llama"], "eos_token_id": 7}).eos_token_ids == (7,)
    assert hf.parse_hf_config({**CONFIGS["llama"], "eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert hf.parse_hf_config(CONFIGS["llama"]).eos_token_ids == ()


def test_directory_refusals(tmp_path):
    with pytest.raises(hf.ModelError, match="no such directory"):
        hf.read_hf_config(tmp_path / "absent")
    for file, kind in (
        ("adapter_config.json", "a PEFT adapter, no model"),
        ("__0_0.distcp", "a Megatron checkpoint; set"),
    ):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / file).touch()
        with pytest.raises(hf.ModelError, match=kind):
            hf.read_hf_config(tmp_path / kind)
    with pytest.raises(
        hf.ModelError, match=r"no config\.json.*pass a model's directory \(`hf download NAME --local-dir"
    ):
        hf.read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(hf.ModelError, match="a file; pass its directory"):
        hf.read_hf_config(tmp_path / "config.json")
    with pytest.raises(hf.ModelError, match="not valid JSON"):
        hf.read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(["Qwen3ForCausalLM"]))
    with pytest.raises(hf.ModelError, match="must be an object"):
        hf.read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(hf.ModelError, match="a Git LFS pointer, not the file"):
        hf.read_hf_config(tmp_path)
    revision = tmp_path / "models--Qwen--Qwen3" / "snapshots" / "0f1e"
    revision.mkdir(parents=True)
    (revision / "config.json").touch()
    with pytest.raises(hf.ModelError, match=rf"pass the directory of a revision, e\.g\. {revision}$"):
        hf.read_hf_config(revision.parents[1])


@pytest.mark.parametrize("named", [[], ["GPT2LMHeadModel"], ["LlamaForCausalLM", "Qwen3ForCausalLM"], "x"])
def test_unsupported_architecture_lists_the_supported_ones(named):
    (problem,) = problems_of({**CONFIGS["llama"], "architectures": named})
    assert all(name in problem for name in (f.architecture for f in hf.FAMILIES.values()))


def test_all_problems_at_once():
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": "64",
        "num_attention_heads": 4,
        "num_key_value_heads": 3,
        "num_hidden_layers": 0,
        "rms_norm_eps": True,
        "use_sliding_window": True,
        "attention_bias": True,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "dynamic", "partial_rotary_factor": 0.5},
    }
    found = " | ".join(problems_of(raw))
    for part in (
        "hidden_size = '64': must be int",
        "num_attention_heads = 4: not a multiple of num_key_value_heads = 3",
        "num_hidden_layers = 0: must be at least 1",
        "rms_norm_eps = True",
        "use_sliding_window",
        "attention_bias",
        "hidden_act",
        "rope_type = 'dynamic'",
        "partial_rotary_factor",
        "intermediate_size: missing",
        "vocab_size: missing",
        "max_position_embeddings: missing",
    ):
        assert part in found


def test_unsupported_routing_is_refused():
    raw = {**CONFIGS["deepseek_v3"], "scoring_func": "softmax", "topk_method": "greedy"}
    found = problems_of(raw)
    assert len(found) == 2
    groups = {"n_group": 2, "topk_group": None}
    assert problems_of({**CONFIGS["deepseek_v3"], **groups}) == ("topk_group = None: n_group = 2 needs it",)
    assert "num_experts: missing" in problems_of({**CONFIGS["qwen3_moe"], "num_experts": None})
    assert problems_of({**CONFIGS["qwen3_moe"], "num_experts_per_tok": 5}) == (
        "num_experts_per_tok = 5: more than the 4 experts",
    )


def test_keys_with_other_defaults_in_libraries_must_be_stated():
    """transformers uses DeepSeek-V3's own values for keys that config.json lacks."""
    stated = ("routed_scaling_factor", "first_k_dense_replace")
    nullable = ("n_group", "topk_group", "n_shared_experts", "q_lora_rank")
    raw = {name: value for name, value in CONFIGS["deepseek_v3"].items() if name not in stated + nullable}
    found = problems_of(raw)
    assert {line.split(":")[0] for line in found} == {*stated, *nullable}
    answered = {**raw, **dict.fromkeys(nullable), "routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
    config = hf.parse_hf_config(answered)
    assert (config.moe.num_groups, config.moe.shared_ffn_hidden_size, config.mla.q_lora_rank) == (None, 0, None)
