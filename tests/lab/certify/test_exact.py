"""`engine.exact`: a certificate without a differing bit, of each engine, precision and layout of the trainer."""

import json

import pytest

from dppo_megatron.lab.certify.command import certify
from dppo_megatron.run.launch.evaluate import with_settings
from tests.support.engines import engine_config, make_model

pytestmark = [pytest.mark.engines, pytest.mark.slow]

# Decoding and prefill, prompts of several lengths, one of them over two blocks of keys.
PROMPTS = ("12+3=", "7" * 20, "45+6=" * 7, "8" * 150)
# A run's engines are compared in tests/e2e: vLLM in bf16 with two ranks, SGLang in fp32 with one.
CASES = [("vllm", "fp32", 1), ("sglang", "bf16", 2)]


@pytest.mark.parametrize(("kind", "dtype", "tensor"), CASES)
def test_no_bit_differs(tmp_path, kind, dtype, tensor):
    model = make_model(tmp_path / "models" / "m", seed=1)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in PROMPTS))
    config = engine_config(model, kind=kind, dtype=dtype, exact=True)
    changes = {
        "run": {"dir": tmp_path / "run"},
        "data": {"train": tmp_path / "prompts.jsonl"},
        "model": {"dtype": dtype},
        "rollout": {"temperature": 0.8},
        "parallel": {"tensor": tensor, "world_size": tensor},
    }
    certificate = certify(with_settings(config, **changes), "config.yaml", prompts=len(PROMPTS))[1]
    head = "engine scored alone, trainer with model.fp32_head"  # another product, which the engine does not compute
    assert {name: t["same_bits"] for name, t in certificate["logprobs"].items() if t["same_bits"] < 1} in (
        {},
        {head: certificate["logprobs"].get(head, {}).get("same_bits")},
    )
    assert certificate["first"] is None
    assert certificate["operators"]["own"]
    assert not any(entry["differing"] for entry in certificate["operators"]["own"])
