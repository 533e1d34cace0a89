"""Warnings of `preflight` about settings that are valid but probably not meant."""

from dppo_megatron.config import Config
from dppo_megatron.run.checks import preflight, user_code


def test_companions_of_a_published_method_are_one_warning_with_the_options_to_add(tree):
    def warnings(objective: dict) -> list[str]:
        notes = preflight(Config.model_validate(tree | {"objective": objective}), "config.yaml")
        return [note for note in notes if "published" in note]

    assert warnings({"name": "grpo"}) == [
        "warning: objective.advantage = group_mean, objective.aggregation = seq_mean_token_sum_norm: not grpo as it "
        "was published; for that add --set objective.advantage=group_mean_std --set "
        "objective.aggregation=seq_mean_token_mean"
    ]
    assert not warnings({"name": "grpo", "advantage": "group_mean_std", "aggregation": "seq_mean_token_mean"})
    assert not warnings({"name": "dppo_binary_tv"})


def test_numbers_in_another_unit_or_without_effect_are_noted(tree):
    def notes(**sections) -> list[str]:
        return preflight(Config.model_validate(tree | sections), "config.yaml")

    tree["train"]["micro_batch_tokens"] = 4
    tree["reward"] = {"timeout_s": 10000}
    tree["model"]["lora"] = {"r": 8}
    found = notes()
    own = "tokens; a longer prompt plus response gets a separate micro-batch"
    assert f"train.micro_batch_tokens = 4: {own}" in found
    assert "warning: optimizer.lr = 1e-06: adapters (model.lora.r) need 1e-4 to 1e-3; raise it" in found
    late = "seconds; run.stall_timeout_s ends the run before a sample fails"
    assert f"reward.timeout_s = 10000: {late}" in found
    tree["train"]["micro_batch_tokens"] = 20
    assert not [note for note in notes(optimizer={"lr": 1e-5}) if "micro_batch" in note or "optimizer.lr" in note]


def test_a_tool_without_a_docstring_is_a_warning(tree):
    environment, notes = {"name": "tests.rollout.environments.worlds:Undescribed"}, []
    config = Config.model_validate(tree | {"environment": environment})
    user_code.environment_problems(config, [], notes)
    assert "worlds:Undescribed: halve without a docstring; write one" in notes[0]
