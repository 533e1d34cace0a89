"""Other trainers can use some objectives, and padding changes nothing. Needs only torch."""

import subprocess
import sys

import pytest
import torch

from dppo_megatron.integrations.padded import averaged, on_rows, presets_for, refuse_unfit, resolve, unfit
from dppo_megatron.objectives import PRESETS, Objective, ObjectiveError, build_objective


def test_an_objective_that_needs_inputs_the_trainer_lacks_is_refused_with_the_reason():
    topk = build_objective("dppo_topk_tv")
    assert not unfit(topk, topk=True)
    with pytest.raises(ObjectiveError, match="dppo_topk_tv cannot be a loss of verl: it reads the engine's list"):
        refuse_unfit(topk, "verl", unfit(topk))
    assert unfit(build_objective("minirl")) == ["compares old and rollout policy, and only one is supplied"]
    assert not unfit(build_objective("minirl"), old=True)
    kl = build_objective("dppo_binary_tv", reference_kl="k3", reference_kl_coefficient=0.1, entropy_coefficient=0.1)
    assert len(unfit(kl)) == 2
    assert not unfit(kl, terms=True)
    for name in ("m2po", "ess_adaptive"):
        assert "takes a number of the whole batch, which comes in micro-batches" in unfit(
            build_objective(name), old=True, topk=True, terms=True
        )
    assert "learns from given answers, not from samples" in unfit(build_objective("nll"))
    reads = type("Reads", (Objective,), {"needs_columns": ("made",)})("reads", kl.settings)
    assert unfit(reads, terms=True) == ["reads columns of the engine's reply"]
    taught = build_objective("pg_is", distillation="sampled", distillation_coefficient=1.0)
    assert unfit(taught) == ["learns from a teacher, which is not supplied"]


def test_presets_that_need_only_the_samples_are_fit():
    fit = presets_for(unfit)
    assert {"dppo_binary_tv", "dppo_binary_kl", "drpo_tr", "grpo", "gspo", "cppo", "vespo"} <= set(fit)
    assert not {"dppo_topk_tv", "score_centering", "minirl", "m2po", "nll"} & set(fit)
    assert next(iter(PRESETS)) in fit


def test_settings_of_a_ready_objective_are_refused():
    assert resolve("dppo_binary_tv", {"delta": 0.2}).settings.delta == 0.2
    with pytest.raises(ObjectiveError, match="is an instance; remove the settings delta"):
        resolve(build_objective("dppo_binary_tv"), {"delta": 0.2})


def test_padding_adds_nothing_to_loss_gradient_or_metrics():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 1, 4])
    mask = torch.arange(6) < lengths[:, None]
    mu = -torch.rand(3, 6, generator=generator, dtype=torch.float64)
    pi = (mu + 0.4 * torch.randn(3, 6, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    advantage = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
    objective = build_objective("gspo", epsilon=0.1)

    def run(width, rubbish):
        keep = mask[:, :width]
        logprob = torch.where(keep, pi[:, :width], rubbish).requires_grad_()
        out = on_rows(
            objective,
            mask=keep,
            logprob=logprob,
            rollout_logprob=torch.where(keep, mu[:, :width], rubbish),
            advantage=advantage,
            reference_logprob=None,
        )
        (gradient,) = torch.autograd.grad(out.loss.sum(), logprob)
        return out, gradient

    narrow, narrow_gradient = run(4, 0.0)
    wide, wide_gradient = run(6, torch.nan)
    assert torch.equal(wide.loss.view(3, 6)[:, :4], narrow.loss.view(3, 4))
    assert torch.equal(wide_gradient[:, :4], narrow_gradient)
    assert not wide_gradient[:, 4:].any()
    assert averaged(wide) == pytest.approx(averaged(narrow), rel=1e-12)


def test_a_mean_without_tokens_is_there_all_the_same():
    rows = torch.full((2, 3), -0.5)
    inputs = {"logprob": rows, "rollout_logprob": rows, "advantage": torch.ones(2, 1)}
    some = averaged(on_rows(build_objective("dppo_binary_tv"), mask=torch.ones(2, 3), **inputs))
    none = averaged(on_rows(build_objective("dppo_binary_tv"), mask=torch.zeros(2, 3), **inputs))
    assert some.keys() == none.keys()
    assert none["policy/masked_share_negative"] == 0.0
    assert "policy/ratio_max" not in some  # a mean of maxima is no maximum


def test_torch_is_enough():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['megatron', 'vllm', 'transformers', 'pydantic', 'numpy.f2py']))\n"
        "import dppo_megatron.integrations.padded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
