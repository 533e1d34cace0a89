"""Agents as a source of rollouts: each in a process of its own, its turns in the group that the bank gets."""

import re

import pytest
from transformers import AutoTokenizer

from dppo_megatron.run.checks import user_code as rules
from tests.rollout.environments.test_episodes import Killed, play, text_of
from tests.rollout.gateway import agents
from tests.support.configs import make_config
from tests.support.tokenizers import save_character_model

pytestmark = pytest.mark.slow

SAID = ["ab", "cd", "ef"]
WHOLE = "ab<eos><user>[ab]<assistant>cd<eos><user>[cd]<assistant>ef<eos>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_character_model(tmp_path_factory.mktemp("tokenizer") / "m"))


def converse(tokenizer, agent, turns=SAID, **settings):
    return play(tokenizer, f"{agents.__name__}:{agent.__name__}", turns, agent=True, chat=True, **settings)


def test_the_conversation_of_an_agent_is_a_trajectory(tokenizer):
    (group,), metrics, requests = converse(tokenizer, agents.talks)
    assert tokenizer.decode(group.prompt.token_ids) == "<user>Hi<assistant>"
    assert text_of(tokenizer, group) == WHOLE
    assert group.rewards.tolist() == [3.0, 3.0]
    assert metrics["environment/turns_mean"] == 3
    assert len({seed for request in requests for seed in request.seeds}) == len(requests) == 6
    (group,), _, _ = converse(tokenizer, agents.unscored, ["42"])
    assert group.rewards.tolist() == [0.5, 0.5]
    assert not group.reward_failed.any()


def test_an_agent_that_fails_at_a_limit_or_is_silent_fails_its_trajectory(tokenizer):
    (group,), metrics, _ = converse(tokenizer, agents.endless, max_turns=2)
    assert text_of(tokenizer, group) == "ab<eos><user>[ab]<assistant>cd<eos>"
    assert group.reward_failed.all()
    (group,), metrics, _ = converse(tokenizer, agents.endless, longest=5)  # of characters
    assert text_of(tokenizer, group) == "ab<eos>"
    for limits, reason in (({"max_turns": 2}, "max_turns"), ({"longest": 5}, "length")):
        (group,), _, _ = converse(tokenizer, agents.copes, **limits)
        assert [r.finish_reason for r in group.rollouts] == [reason] * 2
    (group,), metrics, requests = converse(tokenizer, agents.silent)
    assert group.reward_failed.all()
    assert metrics["environment/failed_raised"] == 2
    assert requests == []


@pytest.mark.parametrize("at_once", [False, True])
def test_limits_hold_for_requests_at_once(tokenizer, at_once):
    settings = {"prompts": ["q"] * 9, "at_once": at_once}
    (group,), metrics, requests = converse(tokenizer, agents.asks, delay_s=0.2, max_turns=3, settings=settings)
    assert len(requests) == 6
    assert set(group.rewards) == {3.0}
    assert (group.rollouts[-1].finish_reason, metrics["environment/max_turns_share"]) == ("max_turns", 1.0)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("lengths", [(1, 60, 60), (60, 1, 1)])
def test_a_turn_stays_within_the_response_after_any_prompt(tokenizer, lengths, at_once):
    settings = {"prompts": ["q" * length for length in lengths], "at_once": at_once}
    (group,), _, requests = converse(
        tokenizer, agents.asks, ["a" * 200], delay_s=0.2, longest=50, samples=1, settings=settings
    )
    assert len(requests) == (3 if len(requests[0].token_ids) > 60 else lengths.count(1))
    for request in requests:
        assert request.max_tokens <= 50
        assert len(request.token_ids) + request.max_tokens <= len(requests[0].token_ids) + 50
    assert group.rewards[0] == len(requests)


def test_it_goes_on_where_a_process_died(tokenizer, tmp_path):
    (whole,), _, _ = converse(tokenizer, agents.talks)
    with pytest.raises(Killed):
        converse(tokenizer, agents.talks, killed_at=2, journals=tmp_path / "j")
    (group,), metrics, requests = converse(tokenizer, agents.talks, ["no", "no", "ef"], journals=tmp_path / "j")
    assert sorted(request.request_id for request in requests) == ["group-0.0.2-0", "group-0.1.2-0"]
    assert metrics["environment/replayed_turns"] == 4
    died = {"settings": {"dies_in": str(tmp_path / "died")}, "samples": 1}
    (again,), metrics, requests = converse(tokenizer, agents.talks, **died)
    assert metrics["environment/replayed_turns"] == 2
    assert len(requests) == 3
    for found in (group, again):
        assert text_of(tokenizer, found) == text_of(tokenizer, whole) == WHOLE
        assert not found.reward_failed.any()


@pytest.mark.parametrize(
    ("environment", "chat", "says"),
    [
        ({"agent": f"{agents.__name__}:talks"}, True, None),
        ({"agent": f"{agents.__name__}:talks"}, False, "set data.chat_template = true"),
        ({"agent": f"{agents.__name__}:talk"}, True, "environment.agent = .*did you mean 'talks'"),
        ({"agent": "a:b", "name": "c:d"}, True, "remove the other"),
        (
            {"agent": f"{agents.__name__}:talks", "settings": {"turn": 2}},
            True,
            r"talks: the call .* fails, got an unexpected keyword argument 'turn'; correct .*settings = {'turn': 2}",
        ),
        ({"agent": f"{agents.__name__}:asks"}, True, "fails, missing a required argument: 'prompts'; correct"),
    ],
)
def test_settings_that_no_agent_can_have_are_refused(environment, chat, says):
    config = make_config(environment=environment, data={"train": "unused", "chat_template": chat})
    found = rules.environment_problems(config, [], [])
    if says is None:
        assert found == []
    else:
        assert re.search(says, "\n".join(found))
