"""Our losses as verl calls them, on its own batches, and our log-probs in its Megatron engine."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from verl import DataProto
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from dppo_megatron.integrations.verl import VerlLoss, register, use_token_statistics
from dppo_megatron.objectives import ObjectiveError, build_objective
from tests.integrations.rows import LENGTHS, MASK, ours

pytestmark = pytest.mark.integrations

PROMPTS = torch.tensor([2, 3, 1, 3])
MODES = {
    "token_mean": "token-mean",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "seq_mean_token_sum": "seq-mean-token-sum",
}


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch() -> DataProto:
    """Prompts padded on the left, responses on the right, as verl's rollout hands them over."""
    left = torch.arange(3) >= 3 - PROMPTS[:, None]
    attention = torch.cat([left, MASK], dim=1).long()
    old = (-normal(4, 9, seed=1).exp()).clamp(max=-1e-3)
    return DataProto.from_dict(
        {
            "prompts": torch.ones(4, 3, dtype=torch.long),
            "responses": torch.ones(4, 9, dtype=torch.long),
            "input_ids": torch.ones(4, 12, dtype=torch.long),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": MASK.long(),
            "old_log_probs": torch.where(MASK, old, 0.0),
            "advantages": torch.where(MASK, normal(4, 1, seed=2), 0.0),
        }
    )


def through_verl(loss_mode: str, agg_mode: str = "token-mean", **fields):
    """(loss, gradient [4, 9] of the response's log-probs, metrics) of verl's own step from DataProto to loss."""
    given = batch()
    data = left_right_2_no_padding(given.to_tensordict())
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    old = given.batch["old_log_probs"]
    pi = (old + 0.6 * normal(4, 9, seed=3)).clamp(max=-1e-3).requires_grad_()
    # The model's output: one row of all tokens, the log-prob of a token at the place before it.
    rows = zip(pi, PROMPTS.tolist(), LENGTHS.tolist(), strict=True)
    flat = torch.cat([torch.cat([p.new_zeros(n - 1), p[:m], p.new_zeros(1)]) for p, n, m in rows])
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=agg_mode,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        **fields,
    )
    loss, metrics = ppo_loss(config, {"log_probs": flat}, data)
    return loss, torch.autograd.grad(loss, pi)[0], metrics, (given.batch, pi)


@pytest.mark.parametrize("agg", MODES)
@pytest.mark.parametrize("preset", ["dppo_binary_tv", "dppo_binary_kl", "drpo_tr", "gspo", "cppo", "vespo", "opsm"])
def test_a_registered_loss_is_the_objective_on_verls_own_batch(preset, agg):
    loss, gradient, metrics, (given, pi) = through_verl(f"dppo_megatron.{preset}", MODES[agg])
    own, our_gradient, out = ours(preset, agg, given["old_log_probs"], pi, given["advantages"])
    # verl adds 1e-8 to the divisors of seq-mean-token-mean; our weights are fp32.
    assert loss.item() == pytest.approx(own.item(), rel=1e-6, abs=1e-8)
    torch.testing.assert_close(gradient, our_gradient, rtol=1e-6, atol=1e-9)
    assert gradient[MASK].any()
    assert metrics["actor/loss/token_mean"].aggregate() == pytest.approx(out.loss.mean().item())


def test_verls_weights_of_the_mismatch_multiply_the_loss():
    rows = torch.full((1, 3), -1.0)
    inputs = {"old_log_prob": rows, "log_prob": rows, "advantages": torch.ones(1, 3), "response_mask": torch.ones(1, 3)}
    loss = VerlLoss(build_objective("dppo_binary_tv"))
    plain, _ = loss(**inputs)
    weighed, _ = loss(**inputs, rollout_is_weights=torch.full((1, 3), 0.5))
    assert weighed == 0.5 * plain


def test_an_objective_that_verl_does_not_support_and_a_taken_name_are_refused():
    assert "dppo_megatron.score_centering" not in POLICY_LOSS_REGISTRY
    with pytest.raises(ObjectiveError, match="score_centering cannot be a loss of verl: it reads the engine's list"):
        register("mine", "score_centering")
    with pytest.raises(ValueError, match="'vanilla' already"):
        register("vanilla", "ppo")


def test_verl_finds_the_losses_by_the_name_of_the_module():
    code = (
        "import sys, verl\n"
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "get_policy_loss_fn('dppo_megatron.drpo_tr')\n"
        "assert not {'megatron', 'vllm', 'pydantic_settings'} & set(sys.modules)"
    )
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "dppo_megatron.integrations.verl"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def tensor_group(tmp_path, monkeypatch):
    from megatron.core import parallel_state

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_log_probs_and_entropy_in_verls_megatron_engine(tensor_group, monkeypatch):
    monkeypatch.setattr("torch._dynamo.config.disable", True)  # verl compiles a product and a sum
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead as Engine

    monkeypatch.setattr(Engine, "_lm_head_logits_processor", Engine._lm_head_logits_processor)  # undone afterwards
    engine = SimpleNamespace(engine_config=SimpleNamespace(entropy_from_logits_with_chunking=False))
    label = torch.randint(0, 11, (1, 6), generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([[1.0, 0.7, 1.0, 1.3, 1.0, 1.0]])
    upstream = normal(2, 6, seed=4).float()

    def run(entropy):
        leaf = normal(1, 6, 11, seed=5).float().requires_grad_()
        found = Engine._lm_head_logits_processor(
            engine,
            leaf * 1.0,  # consumed, as the engine's is
            label,
            temperature.clone(),
            calculate_sum_pi_squared=False,
            calculate_entropy=entropy,
            distillation_use_topk=False,
            distillation_only=False,
            logits_processor_func=None,
            batch=None,
            data_format="thd",
        )
        total = sum((found[name] * weight).sum() for name, weight in zip(sorted(found), upstream, strict=False))
        return {name: found[name].detach() for name in sorted(found)}, torch.autograd.grad(total, leaf)[0]

    for entropy in (False, True):
        theirs, their_gradient = run(entropy)
        with monkeypatch.context() as replaced:
            replaced.setattr(Engine, "_lm_head_logits_processor", Engine._lm_head_logits_processor)
            use_token_statistics()
            found, our_gradient = run(entropy)
        assert found.keys() == theirs.keys()
        for name in found:
            assert found[name].shape == theirs[name].shape == (1, 6)
            torch.testing.assert_close(found[name], theirs[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-6)
