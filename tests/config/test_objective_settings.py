"""The objective's settings are typed like all others, by the axes of the method."""

import pytest

from dppo_megatron.config import ConfigError
from dppo_megatron.run.checks import load_config
from dppo_megatron.run.checks.resume import changed_settings
from tests.support.configs import write_config_file as write

# What a run of a version without typed settings saved of them.
SAVED = [
    ({"name": "dppo_binary_tv", "settings": {"delta": 0.2}}, {"delta": 0.2}),
    ({"name": "ppo", "settings": {"epsilon": 0.1, "epsilon_high": 0.3}}, {"epsilon": 0.1, "epsilon_high": 0.3}),
    ({"name": "minirl", "settings": {"anchor": "recomputed", "ratio_cap": 3}}, {"anchor": "old", "ratio_cap": 3}),
    ({"name": "pg_is", "settings": {"importance": "recomputed"}}, {"importance": "old"}),
    ({"name": "nll", "settings": {}}, {}),
]


def violations(path, overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return list(raised.value.violations)


def test_typos_in_an_axis_and_in_another_section_are_one_error(tmp_path):
    objective = {"name": "ppo", "settings": {"epsilom": 0.2, "dlta": 0.1, "dual_clip": "3"}}
    found = violations(write(tmp_path, objective=objective, train={"stesp": 3, "steps": None}), ["optimizer.lr=fast"])
    lines = {line.partition(" = ")[0].partition(":")[0]: line for line in found}
    assert set(lines) == {
        "objective.settings.epsilom",
        "objective.settings.dlta",
        "objective.settings.dual_clip",
        "train.stesp",
        "train.steps",
        "optimizer.lr",
    }
    assert "did you mean 'epsilon'" in lines["objective.settings.epsilom"]
    assert "did you mean 'delta'" in lines["objective.settings.dlta"]
    assert "= '3': must be a finite number or None" in lines["objective.settings.dual_clip"]
    assert "did you mean train.steps?" in lines["train.stesp"]


def test_an_unknown_method_suggests_the_nearest_and_does_not_hide_its_axes(tmp_path):
    found = "\n".join(
        violations(write(tmp_path, objective={"name": "dppo_tv", "settings": {"dleta": 0.2}}), ["train.steps=many"])
    )
    assert "objective.name = 'dppo_tv': unknown objective 'dppo_tv': did you mean" in found
    assert "'dppo_topk_tv'" in found
    assert "objective.settings.dleta = 0.2: unknown axis 'dleta': did you mean 'delta'" in found
    assert "train.steps = 'many'" in found
    for name, meant in (
        ("dppo", "did you mean 'dppo_binary_tv' or 'dppo_binary_kl' or"),
        ("my.py", "unknown objective 'my.py': write my:NAME, the NAME in that file"),
        ("first.methods.mine", "write first.methods:mine"),
        ("REINFORCE++", "did you mean objective.name (ppo, with objective.advantage batch_normalised)?"),
    ):
        assert meant in violations(write(tmp_path, objective={"name": name}))[0]
    assert violations(write(tmp_path, objective={"settings": {"foo": 1}}))[0].startswith(
        "objective.settings.foo = 1: unknown axis 'foo': `dppo-megatron objectives NAME` lists the axes to pass by name"
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"delta": -1}, "objective.settings.delta = -1: must be above 0"),
        ({"epsilon": "wide"}, "objective.settings.epsilon = 'wide': must be a finite number or None"),
        ({"divergence": "tv"}, "objective.settings.divergence = 'tv': is not one of binary_tv"),
        ({"anchor": "recompute"}, "is not one of rollout, old, recomputed (= old). did you mean 'recomputed'"),
        ({"epsilon": 0.2}, "objective.settings = {'epsilon': 0.2}: objective dppo_binary_tv: epsilon_low=0.2 has no"),
    ],
)
def test_ill_typed_axes_are_named_with_their_accepted_values(tmp_path, settings, expected):
    assert expected in "\n".join(violations(write(tmp_path, objective={"settings": settings})))


def test_an_objective_of_the_user_takes_any_settings(tmp_path):
    settings = {"delta": "wide", "anything": [1, 2]}
    config = load_config(write(tmp_path, objective={"name": "my_package.module:objective", "settings": settings}))
    assert config.objective.settings == settings


@pytest.mark.parametrize(("saved", "settings"), SAVED)
def test_settings_that_an_older_run_saved_are_read_and_resumed(tmp_path, saved, settings):
    before = load_config(write(tmp_path, objective=saved))
    assert before.objective.settings == settings
    assert changed_settings(load_config(write(tmp_path, objective=saved | {"settings": settings})), before) == []
