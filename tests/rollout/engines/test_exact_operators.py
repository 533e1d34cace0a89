"""`engine.exact` replaces a server's operators with the trainer's; without the setting nothing is replaced."""

import importlib.util
import subprocess
import sys
import types
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dppo_megatron.common.row_math import product
from dppo_megatron.rollout.engines import exact, kinds
from dppo_megatron.rollout.engines.exact import Exact, NoExactOperator, Operators
from dppo_megatron.rollout.engines.sglang.kind import PLUGIN
from dppo_megatron.rollout.engines.sglang.plugin.exact_server import sample
from dppo_megatron.run.launch.evaluate import with_settings
from dppo_megatron.vocab_parallel import compiled, token_statistics
from tests.support.engines import VOCAB, engine_config, make_model


def operators(tensor: int = 1, vocab: int = 11, *, fp32_head: bool = False) -> Operators:
    frequencies = tuple((1.0 / 1000.0 ** (torch.arange(0, 8, 2) / 8)).tolist())
    return Operators(Exact(tensor, frequencies, vocab, -(-vocab // tensor), fp32_head))


def layer(kind: str, weight: torch.Tensor, **attributes) -> nn.Module:
    made = type(kind, (nn.Module,), {})()
    made.weight = nn.Parameter(weight)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.slow
def test_a_server_receives_the_layout_of_the_trainer_only_with_engine_exact(tmp_path):
    model = make_model(tmp_path / "models" / "m", seed=1)
    assert exact.VARIABLE not in kinds.server_environment(engine_config(model), 0)
    config = with_settings(engine_config(model, exact=True), parallel={"tensor": 2, "world_size": 2})
    told = exact.from_environment(kinds.server_environment(config, 0))._exact
    assert (told.tensor, told.vocab_size, told.shard_columns, told.fp32_head) == (2, VOCAB, VOCAB // 2, False)
    assert torch.tensor(told.frequencies).dtype == torch.float32
    assert len(told.frequencies) == 16
    assert exact.from_environment({}) is None


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_trainers_shards(tensor, dtype):
    generator = torch.Generator().manual_seed(0)
    x, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 16), (32,)))
    weight = torch.randn(32, 16, generator=generator).to(dtype)
    ours, width = operators(tensor), 16 // tensor
    halves = [
        product(x[:, r * width : (r + 1) * width], weight[:, r * width : (r + 1) * width].t()) for r in range(tensor)
    ]
    expected = halves[0] if tensor == 1 else halves[0] + halves[1]
    assert torch.equal(ours.linear(layer("RowParallelLinear", weight), x, bias), expected + bias)
    merged = layer("MergedColumnParallelLinear", weight, output_sizes=[16, 16])
    torch.testing.assert_close(ours.linear(merged, x), product(x, weight.t()))
    heads = layer("QKVParallelLinear", weight, num_heads=4, num_kv_heads=2, head_size=4)
    torch.testing.assert_close(ours.linear(heads, x, bias), product(x, weight.t()) + bias)


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_head_has_no_logits_behind_the_vocabulary(tensor):
    weight, hidden = torch.randn(16, 8), torch.randn(3, 8)  # 11 tokens, of which a second rank has 5, and padding
    logits = operators(tensor).head(hidden, weight)
    assert logits.shape == (3, 16)
    torch.testing.assert_close(logits[:, :11], hidden @ weight[:11].t())
    assert not logits[:, 11:].any()


def test_a_head_in_fp32_rounds_nothing():
    weight, hidden = torch.randn(16, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    assert operators().head(hidden, weight).dtype == torch.bfloat16
    wide = operators(fp32_head=True).head(hidden, weight)
    assert torch.equal(wide[:, :11], product(hidden.float(), weight[:11].float().t()))


def test_log_probs_are_a_softmax_at_the_temperature():
    logits, temperature = torch.randn(4, 16), torch.tensor([0.5, 1.0, 2.0, 1.0])
    ids = torch.tensor([[3, 1, 2], [1, 1, 4], [10, 0, 9], [5, 6, 7]])  # the target may be among the top K
    expected = (logits[:, :11] / temperature[:, None]).log_softmax(-1).gather(1, ids)
    for tensor in (1, 2):
        torch.testing.assert_close(operators(tensor).logprobs(logits, ids, temperature), expected)


@pytest.mark.parametrize("tensor", [1, 2])
def test_log_probs_of_a_large_vocabulary_are_the_trainers_bits_and_nothing_is_compiled(monkeypatch, tensor):
    def forbidden(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(compiled.CompiledOrEager, "__call__", forbidden)
    vocab = 2 * 8192
    logits, ids = torch.randn(3, vocab), torch.tensor([[3, 1, 2], [16000, 1, 4], [10, 8192, 9]])
    trainer = token_statistics(
        logits.clone(), target_ids=ids[:, 0], topk_ids=ids[:, 1:], vocab_size=vocab, tiles=tensor, entropy="none"
    )
    ours = operators(tensor, vocab).logprobs(logits, ids)
    assert torch.equal(ours, torch.cat((trainer.logprob[:, None], trainer.topk_logprob), dim=1))


def decoder(extra: nn.Module | None = None) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].input_layernorm = layer("RMSNorm", torch.ones(8), variance_epsilon=1e-6)
    model.layers[0].rotary_emb = layer("RotaryEmbedding", torch.ones(1))
    model.layers[0].act_fn = type("SiluAndMul", (nn.Module,), {})()
    if extra is not None:
        model.layers[0].extra = extra
    return model


def test_norm_activation_and_rotation_are_replaced():
    model = decoder()
    operators().install(model)
    inside, x = model.layers[0], torch.randn(3, 8)
    torch.testing.assert_close(inside.input_layernorm(x), F.rms_norm(x, (8,), torch.ones(8), 1e-6))
    normed, stream = inside.input_layernorm(x, x)
    assert torch.equal(stream, x + x)
    torch.testing.assert_close(normed, F.rms_norm(2 * x, (8,), torch.ones(8), 1e-6))
    torch.testing.assert_close(inside.act_fn(x), F.silu(x[:, :4]) * x[:, 4:])
    query, key = inside.rotary_emb(torch.tensor([0, 7, 7]), torch.cat((x, x), 1), x)
    assert torch.equal(query[0], torch.cat((x, x), 1)[0])  # position 0 turns nothing
    assert torch.equal(key[1:], query[1:, :8])
    assert not torch.equal(key[1], x[1])


@pytest.mark.parametrize("kind", ["FusedMoE", "GemmaRMSNorm", "YaRNScalingRotaryEmbedding"])
def test_a_layer_that_the_trainer_has_not_is_named(kind):
    with pytest.raises(NoExactOperator, match=rf"layers\.0\.extra \({kind}\)"):
        operators().install(decoder(layer(kind, torch.ones(1))))


def test_a_product_of_another_kind_is_named():
    with pytest.raises(NoExactOperator, match="ReplicatedLinear"):
        operators().linear(layer("ReplicatedLinear", torch.ones(2, 2)), torch.ones(1, 2))


def test_sglangs_sampler_reports_each_request_over_its_own_top_k():
    """Each request of a step gets the bits that it gets in a step of its own, and keeps its sampled token."""
    logits, ours, counts = torch.randn(5, 11), operators(), [2, 0, 4, 2, 0]
    before, drawn = logits.clone(), torch.tensor([3, 10, 0, 7, 1])

    def draw(sampler, output, *_):
        output.next_token_logprobs = torch.zeros(5)
        output.next_token_top_logprobs_idx = [before[row].topk(k).indices for row, k in enumerate(counts)]
        output.next_token_top_logprobs_val = [torch.zeros(k) for k in counts]
        output.next_token_logits.zero_()  # SGLang draws in place
        return drawn

    output = types.SimpleNamespace(next_token_logits=logits)
    info = types.SimpleNamespace(temperatures=torch.full((5, 1), 0.7))
    assert sample(ours, draw, None, output, info, True, counts) is drawn
    for row, k in enumerate(counts):
        ids = torch.cat((drawn[row : row + 1], before[row].topk(k).indices))[None]
        alone = ours.logprobs(before[row : row + 1], ids, torch.tensor([0.7]))[0]
        assert torch.equal(output.next_token_logprobs[row], alone[0])
        assert torch.equal(output.next_token_top_logprobs_val[row], alone[1:])
        torch.testing.assert_close(alone, (before[row] / 0.7).log_softmax(-1)[ids[0]])


@pytest.mark.parametrize("asked", [False, True])
def test_the_plug_in_of_sglang_hooks_operators_only_where_asked(monkeypatch, asked):
    names = ["sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    hooks = sys.modules[names[-1]]
    hooks.HookRegistry, hooks.HookType = Mock(), types.SimpleNamespace(AROUND="around")
    hooking = "dppo_megatron.rollout.engines.sglang.plugin.exact_server"
    monkeypatch.delitem(sys.modules, hooking)
    monkeypatch.delenv(exact.VARIABLE, raising=False)
    if asked:
        for name, value in operators()._exact.to_environment().items():
            monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("plugin_under_test", PLUGIN / "dppo_sglang_plugin.py")
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    plugin.register()
    targets = [call.args[0] for call in hooks.HookRegistry.register.call_args_list]
    assert any("Sampler.forward" in target for target in targets) is asked
    assert (hooking in sys.modules) is asked


WORKER = """
import os, sys
from vllm.v1.sample.sampler import Sampler
from vllm.model_executor.layers import utils
before = Sampler.forward, utils.dispatch_cpu_unquantized_gemm
import dppo_megatron.rollout.engines.vllm.extension.worker
changed = before != (Sampler.forward, utils.dispatch_cpu_unquantized_gemm)
print(changed, "dppo_megatron.rollout.engines.vllm.extension.exact_server" in sys.modules)
"""


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_a_worker_of_vllm_is_changed_only_where_asked(asked, monkeypatch):
    if asked:
        for name, value in operators()._exact.to_environment().items():
            monkeypatch.setenv(name, value)
    said = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True).stdout
    assert said.split()[-2:] == [str(asked)] * 2
