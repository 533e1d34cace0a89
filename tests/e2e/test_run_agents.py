"""An agent that is written with the published clients, as a source of rollouts from a real server."""

from __future__ import annotations

import shutil

import pytest

from tests.support.audit import audit
from tests.support.engine_watch import Watch, groups_of
from tests.support.faults import Proxy
from tests.support.runs import config_tree, run, write_config

PROMPTS, SAMPLES = 4, 4
STAR = 14  # ends a turn, besides the end-of-sequence token, which the template does not write: then a branch begins
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}*{% else %}={% endif %}{% endfor %}"


@pytest.mark.slow
def test_every_token_that_the_clients_were_told_is_in_the_bank_as_the_engine_sampled_it(task, engine, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(task / "random_model", model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    watch = Watch()
    with Proxy(engine.url, watch) as proxy:
        tree = config_tree(task, tmp_path / "run", urls=(proxy.url,))
        tree["model"]["path"] = str(model)
        tree["data"]["chat_template"] = True
        tree["rollout"] |= {"max_response_tokens": 40, "stop_token_ids": [STAR]}
        tree["environment"] = {"agent": "tests.gateway.published:converses", "workers": 4, "max_turn_tokens": 12}
        config = write_config(tree, tmp_path / "c.yaml")
        run("sample", config, "--n", str(SAMPLES), "--prompts", str(PROMPTS))
    stored = groups_of(tmp_path / "run")
    checked = audit(stored, watch.returned)
    print(checked)
    assert checked.problems == []
    assert not any(group.reward_failed.any() for group in stored)
    assert checked.counts["trajectories"] == PROMPTS * SAMPLES
    assert checked.counts["turns"] == len(watch.returned) == len(watch.asked) == 2 * PROMPTS * SAMPLES
    assert PROMPTS * SAMPLES < checked.counts["branches"] < checked.counts["turns"]
    assert checked.counts["policy tokens"] == sum(len(rollout.token_ids) for rollout in watch.returned.values())
