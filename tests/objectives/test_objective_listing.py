"""The output of `dppo-megatron objectives`."""

import pytest

from dppo_megatron.objectives import AXES, PRESETS, ObjectiveError
from dppo_megatron.objectives.listing import in_words, table


def test_the_table_has_every_preset_with_its_axes():
    head, *lines = table().splitlines()
    assert head.split() == ["name", "divergence", "control", "direction", "anchor", "threshold", "ratio"]
    cells = {line.split()[0]: line.split() for line in lines[: len(PRESETS)]}
    assert list(cells) == list(PRESETS)
    assert cells["dppo_binary_tv"][1:] == ["binary_tv", "mask", "sampled", "mu", "0.15", "pi/mu"]
    assert cells["nll"][1:] == ["-", "none", "-", "-", "-", "1"]
    assert cells["minirl"][4] == "old"
    assert "in [0, 3]" in next(line for line in lines if line.startswith("pg_tis"))
    assert "penalty 12.5" in next(line for line in lines if line.startswith("mask_drpo"))
    assert max(map(len, [head, *lines])) <= 120


@pytest.mark.parametrize("name", PRESETS)
def test_one_method_in_words_with_its_settings(name):
    text = in_words(name)
    assert text.startswith(f"objective {name}: ")
    assert PRESETS[name].source in text
    assert all(f"  {axis} " in text for axis in AXES)
    assert "also accepted: epsilon (sets epsilon_low and epsilon_high), anchor: recomputed (= old)" in text


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ObjectiveError, match=r"unknown objective 'dppo_tv': did you mean .*'dppo_topk_tv'"):
        in_words("dppo_tv")
