"""A whole run of a Qwen3.5 model with experts: gated delta net on two tensor-parallel ranks, and a real vLLM server."""

import pytest

from tests.e2e.test_run_experts import make_sparse_model
from tests.support.actor_cases import DELTA_MOE
from tests.support.runs import config_tree, train_to_end

pytestmark = pytest.mark.engines


def test_engine_and_trainer_agree(task, tmp_path):
    # As published: vLLM's operators on CPUs take no other size of a head, and only bf16.
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    changes = {**DELTA_MOE, **heads, "layer_types": None, "full_attention_interval": 3}
    changes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    changes["vocab_size"] = 24  # transformers adds a token to the tokenizer of this architecture
    model = make_sparse_model(task / "random_model", tmp_path / "model", changes)
    tree = config_tree(task, tmp_path / "run")
    tree["model"]["path"] = str(model)
    tree["model"]["dtype"] = tree["engine"]["dtype"] = "bf16"
    tree["weight_sync"] = {**tree.get("weight_sync", {}), "probe_tolerance": 0.3}
    tree["parallel"]["sequence"] = True  # experts need it with tensor parallelism
    tree["rollout"] |= {"max_mismatch_kl": 0.1, "routing_replay": True}
    trained = train_to_end(tree)
    print([(r["mismatch/max_abs_logprob_difference"], r["probe/max_abs_logprob_difference"]) for r in trained])
    for name in ("mismatch/max_abs_logprob_difference", "probe/max_abs_logprob_difference"):
        assert all(1e-4 < r[name] < 0.3 for r in trained)
