"""Building an objective: presets, overrides, rejected settings and their messages."""

import dataclasses
import re
import sys
import types

import pytest
import torch

from dppo_megatron import objectives
from dppo_megatron.objectives.contract import FLAGS
from tests.objectives.cases import random_case
from tests.objectives.published import PUBLISHED

OF_RESPONSES = ["cppo", "vaco", "trm_max", "trm_mean", "opsm", "flash_reinforce"]
OF_RESPONSES += ["vespo", "topr", "seq_tis", "seq_mis", "minpro"]


def refusal(name: str = "dppo_binary_tv", **overrides) -> str:
    with pytest.raises(objectives.ObjectiveError) as caught:
        objectives.build_objective(name, **overrides)
    return str(caught.value)


def test_every_published_method_is_a_preset_and_ours_is_named_experimental():
    ours = {name for name, preset in objectives.PRESETS.items() if preset.source == "this project"}
    assert ours == {name for name in objectives.PRESETS if name.startswith("experimental_")}
    assert set(objectives.PRESETS) >= set(PUBLISHED)
    with pytest.raises(TypeError):
        objectives.PRESETS["mine"] = objectives.PRESETS["ppo"]


def test_overrides_replace_axes_and_do_not_change_the_preset():
    objective = objectives.build_objective("dppo_topk_tv", delta=0.2, ratio_cap=5)
    assert (objective.settings.delta, objective.settings.ratio_cap) == (0.2, 5)
    assert objective.settings.path == "logprob"
    assert objectives.PRESETS["dppo_topk_tv"].settings.delta == 0.15
    assert objectives.build_objective("ppo", epsilon=0.1).settings.epsilon_high == 0.1
    assert objectives.build_objective("ppo", epsilon=0.1, epsilon_high=0.3).settings.epsilon_high == 0.3


def test_thresholds_of_a_replaced_axis_fall_away():
    settings = objectives.build_objective("ppo", divergence="binary_tv", delta=0.2).settings
    assert (settings.epsilon_low, settings.epsilon_high, settings.delta) == (None, None, 0.2)
    settings = objectives.build_objective("dppo_predictive", control="none").settings
    assert (settings.direction, settings.delta) == ("sampled", None)
    assert objectives.build_objective("minirl", control="none").settings.anchor == "rollout"
    assert objectives.build_objective("minirl", importance="none").settings.gradient_path == "auto"


def test_unknown_names_suggest_the_nearest():
    assert "did you mean 'dppo_binary_tv'" in refusal("dppo_binry_tv")
    assert "did you mean 'dppo_binary_tv' or 'dppo_topk_tv'?" in refusal("dppo_tv")
    assert "known: aspo, bandpo_tv, cispo" in refusal("xyzzy")
    assert "did you mean 'ratio_cap'" in refusal(ratio_caps=5.0)
    assert "did you mean 'topk_tv'" in refusal(divergence="top_tv")
    with pytest.raises(objectives.ObjectiveError, match="name is a string"):
        objectives.build_objective(7)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"delta": "0.2"}, "delta='0.2' must be a finite number or None"),
        ({"delta": True}, "delta=True must be a finite number"),
        ({"delta": float("nan")}, "must be a finite number"),
        ({"delta": 0.0}, "delta=0.0 must be above 0"),
        ({"delta": 15}, "delta=15 masks no token, because a total variation is at most 1: use a value below 1"),
        ({"delta": None}, "delta=None: a region by a TV or KL divergence needs it; set delta"),
        ({"ratio_floor": -1.0}, "must be at least 0"),
        ({"entropy_coefficient": None}, "must be a number, not None"),
        ({"supervised": "yes"}, "must be true or false"),
        ({"divergence": 3}, "divergence=3 is not one of"),
        ({"epsilon_high": 0.28}, "epsilon_high=0.28 has no effect"),
        ({"divergence": "ratio"}, "needs it; set epsilon_low"),
        ({"divergence": "binary_kl", "control": "quadratic"}, "divergence must be"),
        ({"control": "quadratic", "direction": "symmetric"}, "direction='symmetric' has no effect"),
        ({"tail": "uniform"}, "tail='uniform' has no effect"),
        ({"penalty_delta": 2.0}, "penalty_delta=2.0 has no effect"),
        (
            {"divergence": "ratio", "control": "mask_quadratic", "epsilon": 0.2, "penalty_delta": 2.0},
            "penalty_delta=2.0 has no effect",
        ),
        ({"control": "none", "anchor": "old"}, "anchor='old' has no effect"),
        ({"importance": "none", "gradient_path": "ratio"}, "gradient_path='ratio' has no effect"),
        ({"reference_kl_gradient": "estimator"}, "reference_kl_gradient='estimator' has no effect"),
        ({"dual_clip": 3.0}, "dual_clip=3.0 has no effect"),
        ({"ratio_cap": 1.0, "ratio_floor": 2.0}, "ratio_floor=2.0 is above ratio_cap=1.0"),
        ({"ratio_level": "sequence"}, "ratio_level='sequence'"),
        ({"supervised": True}, "must be 'none'"),
        ({"mismatch": "truncate", "mismatch_high": 2.0}, "importance='old'"),
        ({"mismatch": "mask"}, "needs it; set mismatch_high"),
        ({"mismatch_high": 2.0}, "mismatch_high=2.0 has no effect"),
        ({"rejection": "geometric"}, "needs rejection_low or rejection_high"),
        ({"mismatch": "mask", "mismatch_low": 2.0, "mismatch_high": 0.5}, "mismatch_low=2.0 is above"),
        ({"rejection": "sequence", "rejection_low": 2.0, "rejection_high": 0.5}, "rejection_low=2.0 is above"),
        ({"outlier_low": 2.0, "outlier_high": 0.5}, "outlier_low=2.0 is above outlier_high=0.5"),
        ({"control": "gate", "gate": "gaussian", "gate_width": 2.0, "gate_width_max": 1.0}, "gate_width=2.0 is above"),
        ({"reference_kl": "k3"}, "reference_kl_coefficient=0.0: reference_kl needs it"),
        ({"reference_kl_coefficient": 0.1}, "reference_kl_coefficient=0.1 has no effect"),
    ],
)
def test_refusals_name_the_axis_and_the_remedy(overrides, says):
    text = refusal(**overrides)
    assert says in text
    assert text.startswith("objective dppo_binary_tv: ")


def test_all_problems_are_reported_at_once():
    assert "epsilon_low and epsilon_high" in refusal("ppo", delta=0.2)
    assert "dual_clip=1.1 must be above" in refusal("ppo", dual_clip=1.1)
    text = refusal(delta=-1.0, divergence="tv", ratio_cap="big")
    assert all(axis in text for axis in ("delta=-1.0", "divergence='tv'", "ratio_cap='big'"))
    assert all(axis in refusal(aaa=1, bbb=2) for axis in ("'aaa'", "'bbb'"))


@pytest.mark.parametrize("name", objectives.PRESETS)
def test_first_line_names_the_method_and_its_thresholds_are_in_the_words(name):
    objective = objectives.build_objective(name)
    text, s = objective.describe(), objective.settings
    assert text.splitlines()[0].startswith(f"objective {name}: ")
    assert len(text.splitlines()[0]) < 140
    if s.control != "none":
        assert ("recomputed by the trainer" if s.anchor == "old" else "mu, the policy") in text
    if s.delta is not None:
        assert f"delta = {s.delta:g}" in text
    if s.epsilon_high is not None:
        assert re.search(rf"\b{1 + s.epsilon_high:g}\b|{s.epsilon_high:g} above", text)
    if s.ratio_cap is not None:
        assert f"at most {s.ratio_cap:g}" in text
    assert "not a trust region" in text or name not in ("drpo", "mask_drpo")


def test_description_covers_the_corrections():
    text = objectives.build_objective(
        "ppo",
        importance="old",
        mismatch="truncate",
        mismatch_high=2.0,
        rejection="geometric",
        rejection_high=1.01,
        reference_kl="k3",
        reference_kl_coefficient=0.001,
        entropy_coefficient=0.01,
    ).describe()
    for words in ("min(trainer / engine, 2)", "[0, 1.01]", "0.001 KL(pi || reference)", "0.01 entropy"):
        assert words in text


def test_every_preset_declares_the_inputs_that_it_needs():
    needs = {
        name: [f for f in ("topk", "topk_gradient", "old", "sequences", "entropy") if getattr(o, f"needs_{f}")]
        for name, o in ((name, objectives.build_objective(name)) for name in objectives.PRESETS)
    }
    assert {name: what for name, what in needs.items() if what} == {
        "dppo_topk_tv": ["topk"],
        "dppo_topk_kl": ["topk"],
        "dppo_predictive": ["topk"],
        "experimental_topk_quadratic": ["topk", "topk_gradient"],
        "minirl": ["old"],
        "minirl_tis": ["old"],
        "gspo": ["sequences"],
        "dppo_predictive_kl": ["topk"],
        "score_centering": ["topk", "topk_gradient"],
        "score_centering_tis": ["topk", "topk_gradient"],
        "m2po": ["old"],
        "ess_adaptive": ["old"],
        "distributional_ipo": ["topk", "topk_gradient"],
        **{name: ["sequences"] for name in OF_RESPONSES},
    }
    assert objectives.build_objective("ppo", entropy_coefficient=0.1).needs_entropy
    assert not objectives.build_objective("nll").needs_rollout


@pytest.mark.parametrize(
    ("name", "left_out", "says"),
    [
        ("dppo_binary_tv", "rollout_logprob", "dppo_binary_tv needs rollout_logprob"),
        ("dppo_binary_tv", "advantage", "needs advantage"),
        ("dppo_binary_tv", "mask", r"needs mask; pass by name, each \[T\]: logprob, mask, advantage, rollout_logprob$"),
        ("nll", "logprob", r"nll needs logprob; pass by name, each \[T\]: logprob, mask$"),
        ("dppo_topk_tv", "topk", "dppo_topk_tv needs `topk`"),
        ("minirl", "old_logprob", "needs old_logprob"),
        ("gspo", "sequence_ids", "needs sequence_ids"),
    ],
)
def test_missing_inputs_are_named(name, left_out, says):
    call = {key: value for key, value in random_case(0).call.items() if key != left_out}
    with pytest.raises(objectives.ObjectiveError, match=says):
        objectives.build_objective(name)(**call)


def test_an_axis_under_the_name_of_another_trainer_leads_to_ours():
    assert refusal("ppo", clip_low=0.2).endswith("unknown axis 'clip_low'; did you mean epsilon_low?")


def test_misnamed_misshapen_and_coarse_inputs_are_refused():
    call, objective = random_case(0).call, objectives.build_objective("dppo_topk_tv")
    needs = r"'advantages': did you mean 'advantage'.*needs, by name and each \[T\]: logprob, mask"
    with pytest.raises(objectives.ObjectiveError, match=f"unknown input {needs}"):
        objective(**call, advantages=call["advantage"])
    with pytest.raises(objectives.ObjectiveError, match=r"advantage is a float; pass a tensor \[T\]"):
        objective(**{**call, "advantage": 1.0})
    with pytest.raises(objectives.ObjectiveError, match=r"advantage has shape \(3,\)"):
        objective(**{**call, "advantage": torch.ones(3)})
    with pytest.raises(objectives.ObjectiveError, match=r"advantage has shape \(\d+,\) on meta, logprob has .* on cpu"):
        objective(**{**call, "advantage": call["advantage"].to("meta")})
    with pytest.raises(objectives.ObjectiveError, match=r"rollout_logprob is torch\.bfloat16"):
        objective(**{**call, "rollout_logprob": call["rollout_logprob"].bfloat16()})
    for values in (call["mask"] * 2, call["mask"] * 0.5, -call["mask"].long()):
        with pytest.raises(objectives.ObjectiveError, match="mask has values other than 0 and 1; multiply the loss"):
            objective(**{**call, "mask": values})
    with pytest.raises(objectives.ObjectiveError, match=r"logprob must be \[T\]"):
        objective(**{**call, "logprob": call["logprob"][None]})
    topk = call["topk"]
    with pytest.raises(objectives.ObjectiveError, match=r"topk.rollout_logprob is torch.float16"):
        objective(**{**call, "topk": dataclasses.replace(topk, rollout_logprob=topk.rollout_logprob.half())})
    with pytest.raises(objectives.ObjectiveError, match=r"topk.logprob has shape"):
        objective(**{**call, "topk": dataclasses.replace(topk, logprob=topk.logprob[:, :2])})
    uniform = objectives.build_objective("dppo_predictive", tail="uniform")
    with pytest.raises(objectives.ObjectiveError, match="vocab_size"):
        uniform(**{**call, "topk": dataclasses.replace(topk, vocab_size=None)})
    ours = objectives.build_objective("experimental_topk_quadratic")
    with pytest.raises(objectives.ObjectiveError, match="gradient through topk"):
        ours(**{**call, "topk": dataclasses.replace(topk, logprob=topk.logprob.detach())})


def test_nll_needs_only_logprob_and_mask():
    logprob = torch.tensor([-1.0, -2.0, -torch.inf], requires_grad=True)
    out = objectives.build_objective("nll")(logprob=logprob, mask=torch.tensor([1, 1, 0]))
    out.loss.sum().backward()
    assert out.loss.tolist() == [1.0, 2.0, 0.0]
    assert logprob.grad.tolist() == [-1.0, -1.0, 0.0]
    assert out.weight.tolist() == [1.0, 1.0, 0.0]


def test_the_old_policy_may_be_written_by_its_former_name():
    former = objectives.build_objective("minirl", anchor="recomputed")
    assert former.settings == objectives.build_objective("minirl").settings
    assert former.settings.anchor == "old"
    assert objectives.build_objective("pg_is", importance="recomputed") == objectives.build_objective(
        "pg_is", importance="old"
    )


def test_old_anchor_moves_the_region_but_not_the_importance_ratio():
    case = random_case(2, tokens=40)
    drifted = case.call["logprob"].detach() + 0.05  # within 1.2 of the old policy everywhere
    call = {**case.call, "old_logprob": drifted}
    out = objectives.build_objective("minirl")(**call)
    assert not out.masked_tokens.any()
    assert torch.equal(out.weight, torch.ones(40, dtype=torch.float64))
    assert objectives.build_objective("grpo", epsilon_high=0.27)(**call).masked_tokens.any()


def test_old_anchor_of_a_topk_method_needs_its_own_list():
    case = random_case(2)
    objective = objectives.build_objective("dppo_topk_tv", anchor="old")
    with pytest.raises(objectives.ObjectiveError, match=r"topk\.old_logprob"):
        objective(**case.call)
    here = case.topk.logprob.detach()
    topk = dataclasses.replace(case.topk, old_logprob=here)
    out = objective(**{**case.call, "topk": topk, "old_logprob": case.call["logprob"].detach()})
    assert out.divergence.max() < 1e-12


@pytest.fixture
def user_module():
    module = types.ModuleType("users_own_objectives")
    module.settings = objectives.ObjectiveSettings(divergence="binary_tv", delta=0.3)
    module.ready = objectives.Objective("mine", objectives.ObjectiveSettings(delta=0.3))
    module.factory = lambda delta=0.1: objectives.Objective("made", objectives.ObjectiveSettings(delta=delta))
    module.useless = lambda: 3
    module.bare = lambda: types.SimpleNamespace(
        name="bare", settings=None, describe=str, __call__=None, **dict.fromkeys(["needs_topk", "needs_old"], False)
    )
    sys.modules[module.__name__] = module
    yield module.__name__
    del sys.modules[module.__name__]


def test_a_users_own_by_dotted_path(user_module):
    own = objectives.build_objective(f"{user_module}:settings", delta=0.4)
    assert own.settings.delta == 0.4
    assert own.name == f"{user_module}:settings"
    assert objectives.build_objective(f"{user_module}:ready").name == "mine"
    assert objectives.build_objective(f"{user_module}:factory", delta=0.5).settings.delta == 0.5
    needs = "needs_rollout, needs_reference, needs_topk_gradient"
    for path, overrides, says in (
        ("ready", {"delta": 0.1}, "remove the settings delta"),
        ("factory", {"dleta": 0.1}, "rejected its settings"),
        ("useless", {}, "lacks name, settings"),
        ("bare", {}, f"lacks needs_columns, {needs}, .*needs_statistic, moves_without"),
        ("absent", {}, "cannot be loaded"),
    ):
        with pytest.raises(objectives.ObjectiveError, match=says):
            objectives.build_objective(f"{user_module}:{path}", **overrides)
    with pytest.raises(objectives.ObjectiveError, match="cannot be loaded"):
        objectives.build_objective("no_such_package.module:thing")


def test_every_need_is_declared_and_follows_from_the_settings_or_a_class_attribute():
    class OwnEntropyBonus(objectives.Objective):
        needs_entropy = True

    plain = OwnEntropyBonus("own", objectives.ObjectiveSettings(control="none"))
    assert len(FLAGS) == 11
    set_here = {"needs_rollout", "needs_entropy", "moves_without_advantage"}
    assert {name for name in FLAGS if getattr(plain, name)} == set_here
    with pytest.raises(NotImplementedError, match="needs_statistic; implement with_statistic"):
        objectives.ObjectiveProtocol.with_statistic(plain, torch.zeros(1))


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise GeneratorExit", "undefined()"])
def test_a_users_module_or_factory_may_raise_anything(tmp_path, monkeypatch, end):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"ends_{abs(hash(end))}"
    (tmp_path / f"{name}_on_import.py").write_text(f"import sys\n{end}\n")
    (tmp_path / f"{name}_when_called.py").write_text(f"import sys\ndef factory():\n    {end}\n")
    with pytest.raises(objectives.ObjectiveError, match=f"'{name}_on_import:factory' cannot be loaded: "):
        objectives.build_objective(f"{name}_on_import:factory")
    with pytest.raises(objectives.ObjectiveError, match=f"'{name}_when_called:factory' rejected its settings: "):
        objectives.build_objective(f"{name}_when_called:factory")


def test_settings_are_frozen_values_with_a_word_on_every_axis():
    settings = objectives.build_objective("ppo").settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.epsilon_low = 1.0
    assert settings == objectives.build_objective("grpo").settings
    assert hash(settings) == hash(objectives.build_objective("grpo").settings)
    assert objectives.ObjectiveSettings(**dataclasses.asdict(settings)) == settings
    assert all(field.metadata["doc"] for field in objectives.AXES.values())
