"""Every spelling and shard of the weight map, without a Megatron model."""

import pytest
import torch

from dppo_megatron import hf
from tests.support.models import CONFIGS, EXPERT_FAMILIES

_TE_SPELLINGS = {
    "qwen3": {
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight": ("model.layers.3.input_layernorm.weight"),
        "decoder.layers.3.mlp.linear_fc1.layer_norm_weight": "model.layers.3.post_attention_layernorm.weight",
    },
    "qwen3_moe": {
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "model.layers.0.post_attention_layernorm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight": "model.layers.1.post_attention_layernorm.weight",
        "decoder.layers.2.mlp.experts.linear_fc2.weight3": "model.layers.2.mlp.experts.3.down_proj.weight",
    },
    "deepseek_v3": {
        "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight": (
            "model.layers.1.self_attn.q_a_layernorm.weight"
        ),
        "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight": (
            "model.layers.1.self_attn.kv_a_layernorm.weight"
        ),
    },
}


def config_of(family: str, **changes) -> hf.HFModelConfig:
    return hf.parse_hf_config({**CONFIGS[family], **changes})


def random_tensors(weight_map: hf.WeightMap) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in weight_map.hf_tensors().items()}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shard_mla_down", [False, True])
def test_shards_of_all_ranks_give_back_the_hf_tensors(family, size, shard_mla_down):
    # Four ranks share two query groups of the GQA families: the shards split the groups.
    weight_map = hf.WeightMap(config_of(family), hf.MegatronLayout(64, shard_mla_down))
    source = random_tensors(weight_map)
    found = {}
    for entry in weight_map.entries():
        shards = [weight_map.to_megatron(entry, source, rank, size) for rank in range(size)]
        assert len({shard.shape for shard in shards}) == 1
        for name, part in weight_map.to_hf(entry, shards).items():
            if entry.stacks_experts:  # the experts of a layer come one by one
                part = torch.cat((found[name], part[None])) if name in found else part[None]
            found[name] = part
    assert found.keys() == source.keys()
    assert all(torch.equal(found[name], source[name]) for name in source)


def test_vocabulary_padding_is_zero_and_is_dropped_again():
    weight_map = hf.WeightMap(config_of("qwen3"), hf.MegatronLayout(padded_vocab_size=128))
    entry = weight_map.entry("embedding.word_embeddings.weight")
    table = torch.randn(61, 32)
    shards = [weight_map.to_megatron(entry, {"model.embed_tokens.weight": table}, r, 4) for r in range(4)]
    whole = torch.cat(shards)
    assert whole.shape == (128, 32)
    assert torch.equal(whole[:61], table)
    assert not whole[61:].any()
    assert torch.equal(weight_map.to_hf(entry, shards)["model.embed_tokens.weight"], table)


def test_transformer_engine_spellings_map_to_the_same_tensors():
    for family, spellings in _TE_SPELLINGS.items():
        weight_map = hf.WeightMap(config_of(family))
        for megatron, expected in spellings.items():
            assert [t.name for t in weight_map.entry(megatron).hf] == [expected]


def test_tied_head_is_loaded_from_the_embedding_and_exported_once():
    weight_map = hf.WeightMap(config_of("qwen3", tie_word_embeddings=True))
    assert [t.name for t in weight_map.entry("output_layer.weight").hf] == ["model.embed_tokens.weight"]
    assert "lm_head.weight" not in weight_map.hf_tensors()
    exported = [t.name for entry in weight_map.entries() if not entry.rule.duplicate for t in entry.hf]
    assert len(exported) == len(set(exported))


@pytest.mark.parametrize("family", [name for name in EXPERT_FAMILIES if name != "qwen3_5_moe_text"])
def test_dense_and_expert_layers_have_their_own_parameters(family):
    weight_map = hf.WeightMap(config_of(family))
    weight_map.entry("decoder.layers.0.mlp.linear_fc1.weight")
    weight_map.entry("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight")
    for absent in (
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.1.mlp.experts.local_experts.4.linear_fc1.weight",
        "decoder.layers.4.input_layernorm.weight",
        "decoder.layers.1.mlp.experts.local_experts.0.linear_fc3.weight",
    ):
        with pytest.raises(hf.ModelError, match=family):
            weight_map.entry(absent)


def test_moonlight_style_queries_are_not_compressed():
    weight_map = hf.WeightMap(config_of("deepseek_v3", q_lora_rank=None, n_shared_experts=0))
    entry = weight_map.entry("decoder.layers.1.self_attention.linear_q_proj.weight")
    assert entry.hf[0] == hf.HFTensor("model.layers.1.self_attn.q_proj.weight", (64, 32))
    assert not [name for name in weight_map.hf_tensors() if "q_a" in name or "shared" in name]


def test_wrong_inputs_name_the_tensor():
    weight_map = hf.WeightMap(config_of("llama"))
    entry = weight_map.entry("decoder.layers.0.mlp.linear_fc2.weight")
    with pytest.raises(hf.ModelError, match=r"down_proj\.weight: absent"):
        weight_map.to_megatron(entry, {})
    with pytest.raises(hf.ModelError, match=r"shape \(3, 4\), expected shape \(32, 48\)"):
        weight_map.to_megatron(entry, {entry.hf[0].name: torch.zeros(3, 4)})
    with pytest.raises(hf.ModelError, match="does not divide over 5 ranks"):
        weight_map.to_megatron(entry, {entry.hf[0].name: torch.zeros(32, 48)}, 0, 5)
    with pytest.raises(hf.ModelError, match=r"shape \(32, 96\)"):
        weight_map.to_hf(entry, [torch.zeros(32, 48)] * 2)
    heads = hf.WeightMap(config_of("qwen3_5_text", linear_num_key_heads=2, linear_num_value_heads=4))
    conv = heads.entry("decoder.layers.0.self_attention.conv1d.weight")
    with pytest.raises(hf.ModelError, match="2 groups of heads do not divide over 4 ranks"):
        heads.to_megatron(conv, {conv.hf[0].name: torch.zeros(conv.hf[0].shape)}, 0, 4)
    with pytest.raises(hf.ModelError, match="only 10 rows"):
        hf.WeightMap(config_of("llama"), hf.MegatronLayout(10))
