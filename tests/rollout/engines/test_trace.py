"""The trace hooks of an engine's worker, on a model with the module names of vLLM and SGLang."""

import numpy as np
import torch
from torch import nn

from dppo_megatron.rollout.engines.sglang import wire as sglang_wire
from dppo_megatron.rollout.engines.sglang.plugin.dppo_sglang_plugin import _text
from dppo_megatron.rollout.engines.trace import OUTSIDE, TraceRecorder, joined
from dppo_megatron.rollout.engines.vllm.extension import wire as vllm_wire

H, HEADS, D, VOCAB = 8, 2, 4, 11


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class QKV(Linear):
    num_heads, num_kv_heads, head_size = HEADS, 1, D


class Norm(nn.Module):
    def forward(self, x, residual=None):
        return 2 * x if residual is None else (2 * (x + residual), x + residual)


class Rotation(nn.Module):
    def forward(self, positions, q, k):
        q.neg_()  # in place, as the kernels do
        return q, k


class Attention(nn.Module):
    def __init__(self, rotation):
        super().__init__()
        self.qkv_proj, self.rotary_emb = QKV(H, (HEADS + 2) * D, bias=False), rotation

    def forward(self, positions, x):
        q, k, _ = self.qkv_proj(x)[0].split((HEADS * D, D, D), dim=-1)
        return self.rotary_emb(positions, q.contiguous(), k.contiguous())[0]


class Layer(nn.Module):
    def __init__(self, rotation):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(), Attention(rotation)

    def forward(self, positions, x, residual):
        normed = self.input_layernorm(x) if residual is None else self.input_layernorm(x, residual)
        x, residual = (normed, x) if residual is None else normed
        return self.self_attn(positions, x), residual


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        rotation = Rotation()  # one for all layers
        self.embed_tokens = nn.Embedding(VOCAB, H)
        self.layers = nn.ModuleList(Layer(rotation) for _ in range(2))

    @torch.no_grad()
    def forward(self, ids):
        x, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            x, residual = layer(torch.arange(len(ids)), x, residual)


def test_each_layer_has_its_own_values_though_one_module_rotates_all():
    model, ids = Model(), torch.tensor([3, 1, 4])
    recorder = TraceRecorder(model, ids.tolist())
    model(ids)
    trace = recorder.take()
    for layer in range(2):
        assert torch.equal(trace[layer, "q_rotated"], -trace[layer, "q_projection"])
    assert torch.equal(trace[1, "residual"], trace[OUTSIDE, "embedding"] + trace[0, "q_rotated"])
    assert torch.equal(trace[1, "input_norm"], 2 * trace[1, "residual"])
    assert trace[0, "v_projection"].shape == (3, D)


def test_rows_of_the_sequence_are_found_in_a_batch_and_other_passes_are_left_out():
    model, ids = Model(), torch.tensor([3, 1, 4])
    alone = TraceRecorder(model, ids.tolist())
    model(ids)
    expected = alone.take()
    recorder = TraceRecorder(model, ids.tolist())
    model(torch.tensor([5]))
    model(torch.tensor([9, 2, 3, 1, 4, 3]))
    model(torch.tensor([1, 4, 3]))
    found = recorder.take()
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected)


def test_without_the_sequence_nothing_is_recorded_and_no_hook_stays():
    model = Model()
    recorder = TraceRecorder(model, [3, 1, 4])
    model(torch.tensor([3, 1]))
    assert recorder.take() == {}
    assert not any(module._forward_hooks for module in model.modules())


def test_shards_are_joined_and_replicated_values_are_taken_once():
    parts = [{(0, "mlp_up"): torch.full((2, 1), rank), (0, "mlp"): torch.ones(2, 3)} for rank in (0.0, 1.0)]
    whole = joined(parts)
    assert whole[0, "mlp_up"].tolist() == [[0, 1], [0, 1]]
    assert whole[0, "mlp"].shape == (2, 3)


def test_traces_come_as_they_were_sent_bit_by_bit():
    odd = torch.tensor([[float("nan"), -0.0, 1e-40]])
    trace = {(OUTSIDE, "embedding"): odd, (7, "mlp"): torch.randn(3, 5).bfloat16()[:, ::2]}
    sent = [(*key, vllm_wire.bits_of(v).tobytes(), vllm_wire.dtype_name(v.dtype), v.shape) for key, v in trace.items()]
    reply = vllm_wire.encode_trace(np.zeros(2, np.float32), [sent, sent])
    of_vllm = vllm_wire.decode_trace(*vllm_wire.decode_reply(reply))
    of_sglang = sglang_wire.decode_trace({f"{layer}/{name}": _text(v) for (layer, name), v in trace.items()})
    for found in (*of_vllm, of_sglang):
        assert found.keys() == trace.keys()
        for key, value in trace.items():
            assert found[key].dtype == value.dtype
            assert np.array_equal(vllm_wire.bits_of(found[key]), vllm_wire.bits_of(value))
