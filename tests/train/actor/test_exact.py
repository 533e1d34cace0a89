"""With `engine.exact` the trainer computes the same bits in every packing, and trains as without it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.rollout.engines import exact
from dppo_megatron.rollout.engines.exact import Exact, Operators
from dppo_megatron.rollout.engines.serving import exact_environment
from dppo_megatron.train.actor.local.exact import ExactAttention
from dppo_megatron.vocab_parallel import compiled
from tests.support.actor_cases import VOCAB, K, pack, sequences
from tests.support.actor_ranks import Rank, on_ranks
from tests.train.actor.scenarios.parts import train

EXACT = {"engine": {"exact": True, "dtype": "fp32"}}
LAYOUTS = {1: {"alone": {}}, 2: {"tensor": {"tensor": 2}, "sequence": {"tensor": 2, "sequence": True}}}


@on_ranks(1, 2)
def test_exact_log_probs_have_the_same_bits_in_any_pack_and_training_agrees_with_the_default(rank: Rank):
    parts, logprobs = sequences(), []
    for name, layout in LAYOUTS[rank.world_size].items():
        with rank.actor(sections=EXACT, **layout) as actor:
            packed = torch.cat([s.logprob for s in actor.scores([pack(parts)])])
            alone = torch.cat([s.logprob for s in actor.scores([pack([part]) for part in parts])])
            assert torch.equal(packed, alone), name
            trained = train(actor, parts)
        with rank.actor(**layout) as actor:
            expected = train(actor, parts)
        for key in expected.keys() - {"masked_tokens"}:
            got, wanted = torch.as_tensor(trained[key]), torch.as_tensor(expected[key])
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, msg=f"{name}: {key}")
        logprobs.append(packed)
    # Shards that are added in their order are the same in every layout of them.
    assert torch.equal(logprobs[0], logprobs[-1])


PROMPT = 5  # tokens that are read at once; the rest one by one


class Server:
    """Reads the files that vLLM and SGLang read, and calls `Operators` where they do."""

    def __init__(self, directory: Path, config: Any, dtype: torch.dtype):
        self._operators = exact.from_environment(exact_environment(config))
        self._config = json.loads((directory / "config.json").read_text())
        weights = load_file(directory / "model.safetensors")
        self._weights = {name: weight.to(dtype) for name, weight in weights.items()}
        self._size = self._config.get("head_dim") or self._config["hidden_size"] // self._config["num_attention_heads"]

    def scores(self, token_ids: Tensor, temperature: Tensor) -> Tensor:
        """[T] of each next token, 0 of the last."""
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        steps = [token_ids[:PROMPT], *token_ids[PROMPT:].split(1)]
        logits = torch.cat([self._logits(step) for step in steps if len(step)])
        targets = torch.cat((token_ids[1:], token_ids[:1]))[:, None]
        return self._operators.logprobs(logits, targets, temperature)[:, 0]

    def _logits(self, token_ids: Tensor) -> Tensor:
        c, ours = self._config, self._operators
        x, stream = self._weights["model.embed_tokens.weight"][token_ids], None
        before = len(self._cache[0][0]) if self._cache else 0
        positions = before + torch.arange(len(token_ids))
        for number in range(c["num_hidden_layers"]):
            at = f"model.layers.{number}"
            x, stream = self._norm(f"{at}.input_layernorm", x, stream)
            heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
            fused = self._layer("QKVParallelLinear", *(f"{at}.self_attn.{name}_proj" for name in "qkv"))
            fused.num_heads, fused.num_kv_heads, fused.head_size = heads, groups, self._size
            sizes = [n * self._size for n in (heads, groups, groups)]
            q, k, v = ours.linear(fused, x).split(sizes, dim=-1)
            if f"{at}.self_attn.q_norm.weight" in self._weights:
                q, k = (
                    self._norm(f"{at}.self_attn.{name}_norm", y.reshape(len(y), -1, self._size))[0].flatten(1)
                    for name, y in (("q", q), ("k", k))
                )
            q, k = ours._rotary(positions, q, k)
            x = self._attention(number, *(y.reshape(len(y), -1, self._size) for y in (q, k, v)))
            x = ours.linear(self._layer("RowParallelLinear", f"{at}.self_attn.o_proj"), x)
            x, stream = self._norm(f"{at}.post_attention_layernorm", x, stream)
            merged = self._layer("MergedColumnParallelLinear", f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
            merged.output_sizes = [c["intermediate_size"]] * 2
            x = ours.activation(ours.linear(merged, x))
            x = ours.linear(self._layer("RowParallelLinear", f"{at}.mlp.down_proj"), x)
        x, _ = self._norm("model.norm", x, stream)
        tied = self._weights["model.embed_tokens.weight"]
        return ours.head(x, self._weights.get("lm_head.weight", tied))

    def _attention(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        old = self._cache.get(number, (key[:0], value[:0]))
        keys, values = self._cache[number] = tuple(torch.cat(pair) for pair in zip(old, (key, value), strict=True))
        lengths, counts = torch.tensor([len(keys)]), torch.tensor([len(query)])
        cached = (keys[None], values[None])
        return exact.attend(query, lambda requests, length: cached, lengths, counts, self._size**-0.5).flatten(1)

    def _norm(self, name: str, x: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        module = self._layer("RMSNorm", name)
        module.variance_epsilon = self._config["rms_norm_eps"]
        out = exact._norm(module, x, stream)
        return out if isinstance(out, tuple) else (out, x)

    def _layer(self, kind: str, *names: str) -> Any:
        made: Any = type(kind, (nn.Module,), {})()
        made.weight = torch.cat([self._weights[f"{name}.weight"] for name in names])
        return made


@pytest.mark.parametrize("model", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_ranks(1, 2)
def test_a_server_that_decodes_has_the_bits_of_the_packed_pass(rank: Rank, model: str, dtype: str):
    parts = sequences(6)
    sections, layout = {"engine": {"exact": True, "dtype": dtype}}, {"tensor": rank.world_size}
    with rank.actor(model, sections=sections, settings={"dtype": dtype}, **layout) as actor:
        trained = torch.cat([s.logprob for s in actor.scores([pack(parts)])])
        server = Server(rank.models / model, actor.config, DTYPES[dtype].torch)
    if rank.rank == 0:  # a server would decode the same on each
        scored = torch.cat([server.scores(part["token_ids"], part["temperature"]) for part in parts])
        assert torch.equal(trained, torch.where(pack(parts).mask, scored, 0))


@on_ranks(1, 2)
def test_an_engine_merges_shards_as_the_ranks_do(rank: Rank):
    """Log-probs merged from the ranks' shards of logits, and an engine's of the whole logits."""
    from dppo_megatron.vocab_parallel import token_statistics

    columns = -(-VOCAB // rank.world_size)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, columns * rank.world_size, generator=generator)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[: 1 + K] for _ in range(50)])
    temperature = torch.linspace(0.5, 1.5, 50)
    operators = Operators(Exact(rank.world_size, (), VOCAB, columns, fp32_head=False))
    with rank.actor(tensor=rank.world_size) as actor:
        own = logits[:, rank.rank * columns : (rank.rank + 1) * columns].contiguous()
        group = actor.layout.tensor_group if rank.world_size > 1 else None
        for k in (0, K):
            topk = ids[:, 1:] if k else None
            options = {"vocab_size": VOCAB, "temperature": temperature, "group": group}
            found = token_statistics(own.clone(), ids[:, 0], topk, **options)
            own_ids = [found.logprob[:, None], *([] if topk is None else [found.topk_logprob])]
            engine = operators.logprobs(logits[:, :VOCAB], ids[:, : 1 + k], temperature)
            assert torch.equal(torch.cat(own_ids, dim=1), engine)


@on_ranks(1)
def test_without_the_setting_the_layers_are_those_of_other_runs(rank: Rank):
    """With it, these compute otherwise than Megatron's and ours do in every run."""
    exact = {"core_attention", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer"}
    for sections, expected in (({}, set()), (EXACT, exact)):
        with rank.actor(sections=sections) as actor:
            layers = actor.model_chunks[0].named_modules()
            changed = (
                name for name, layer in layers if type(layer) is ExactAttention or "_forward_impl" in vars(layer)
            )
            assert {name.rpartition(".")[2] for name in changed} == expected


@on_ranks(1)
def test_nothing_is_compiled_for_an_engine_computes_in_another_process(rank: Rank):
    """Without the setting, statistics of columns that are worth it run compiled code."""
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(compiled, "_WORTHWHILE", 0)
        patch.setattr(compiled.CompiledOrEager, "__call__", lambda *_, **__: calls.append(1))
        for sections, compiles in (({}, True), (EXACT, False)):
            calls.clear()
            with rank.actor(sections=sections) as actor:
                list(actor.scores([pack(sequences())]))
            assert bool(calls) == compiles
