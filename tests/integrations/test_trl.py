"""GRPOTrainer computes our losses and trains with them."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from dppo_megatron.integrations.trl import ObjectiveTrainer, _dropout_problems
from dppo_megatron.objectives import ObjectiveError

pytestmark = pytest.mark.integrations

VOCABULARY = ("<pad>", "<eos>", *"0123456789+=")


def tokenizer() -> PreTrainedTokenizerFast:
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>")


def policy(directory: str) -> Qwen3ForCausalLM:
    """Return a random policy that knows its directory: TRL loads the reference policy from there."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            initializer_range=0.3,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.save_pretrained(directory)
    return Qwen3ForCausalLM.from_pretrained(directory)


def odd(completions, **_):
    return [float(sum(map(ord, text)) % 2) for text in completions]


def trainer(tmp_path, cls=ObjectiveTrainer, /, *, own=None, generation=None, **settings):
    arguments = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **settings,
    }
    prompts = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in (1, 33, 5, 70) for b in range(4)]})
    model = policy(f"{tmp_path}/policy")
    model.generation_config.update(**(generation or {}))
    return cls(
        model, odd, args=GRPOConfig(**arguments), train_dataset=prompts, processing_class=tokenizer(), **(own or {})
    )


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 1, 3, 4])
    return {
        "prompt_ids": torch.randint(2, len(VOCABULARY), (4, 3), generator=generator),
        "prompt_mask": torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1]]),
        "completion_ids": torch.randint(2, len(VOCABULARY), (4, 5), generator=generator),
        "completion_mask": (torch.arange(5) < lengths[:, None]).int(),
        "advantages": torch.tensor([1.0, -0.5, 0.0, -2.0]),
        "num_items_in_batch": torch.tensor(40),
        "old_per_token_logps": -2.6 + torch.randn(4, 5, generator=generator),
    }


def loss_and_gradient(at: GRPOTrainer, given: dict[str, torch.Tensor]):
    at.current_gradient_accumulation_steps = at.args.gradient_accumulation_steps
    loss = at._compute_loss(at.model, given)
    return loss.detach(), torch.autograd.grad(loss, list(at.model.parameters()), allow_unused=True)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("preset", "axes", "settings"),
    [
        *(("grpo", {}, {"loss_type": kind}) for kind in ("dapo", "bnpo", "grpo", "dr_grpo")),
        ("grpo_clip_higher", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("sapo", {}, {"loss_type": "sapo"}),
        ("vespo", {}, {"loss_type": "vespo"}),
        ("ppo", {}, {"loss_type": "luspo"}),
        ("opsm", {}, {"loss_type": "grpo", "off_policy_mask_threshold": 0.5}),
        (
            "grpo",
            {"reference_kl": "k3", "reference_kl_coefficient": 0.1, "reference_kl_gradient": "estimator"},
            {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
        ),
    ],
)
def test_a_preset_that_trl_has_too_has_its_gradient(tmp_path, preset, axes, settings):
    only_theirs = ("epsilon_high", "off_policy_mask_threshold", "use_bias_correction_kl")
    ours = trainer(
        tmp_path,
        own={"objective": preset, "settings": axes},
        **{name: value for name, value in settings.items() if name not in only_theirs},
    )
    theirs = trainer(tmp_path, GRPOTrainer, **settings)
    given = inputs()
    if "beta" in settings:
        given["ref_per_token_logps"] = given["old_per_token_logps"] + 0.3
    our_loss, our_gradient = loss_and_gradient(ours, given)
    their_loss, their_gradient = loss_and_gradient(theirs, given)
    for mine, their in zip(our_gradient, their_gradient, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-6)
    assert any(gradient.abs().max() > 1e-4 for gradient in our_gradient)
    if preset not in ("sapo", "vespo"):  # of a gate TRL logs its integral
        torch.testing.assert_close(our_loss, their_loss, rtol=1e-5, atol=1e-7)


def test_the_lists_are_those_of_the_weights_that_sampled(tmp_path):
    at = trainer(tmp_path, own={"objective": "score_centering", "topk": 6})
    given = inputs()
    given |= at._lists(given)
    assert given["topk_ids"].shape == given["topk_logps"].shape == (4, 5, 6)
    logprob, entropy, lists = at._policy(at.model, given)
    # The same weights: pi is mu, and TRL's own log-probs and entropies are these.
    torch.testing.assert_close(lists.logprob, lists.rollout_logprob, rtol=1e-5, atol=1e-6)
    fused, fused_entropy, _ = at._get_per_token_logps_and_entropies(
        at.model,
        torch.cat([given["prompt_ids"], given["completion_ids"]], dim=1),
        torch.cat([given["prompt_mask"], given["completion_mask"]], dim=1),
        5,
        compute_entropy=True,
    )
    kept = given["completion_mask"].bool()
    torch.testing.assert_close(logprob[kept], fused[kept], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy[kept], fused_entropy[kept], rtol=1e-5, atol=1e-6)
    # On policy the correction of score centering is zero: the plain policy gradient is left.
    del given["old_per_token_logps"]
    _, centred = loss_and_gradient(at, given)
    plain = trainer(tmp_path, own={"objective": "pg_is"})
    _, expected = loss_and_gradient(plain, given)
    for mine, their in zip(centred, expected, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", ["dppo_binary_tv", "dppo_topk_tv", "score_centering_tis"])
def test_the_trl_trainer_trains_and_logs_the_metrics_of_the_objective(tmp_path, objective):
    at = trainer(tmp_path, own={"objective": objective, "topk": 4}, steps_per_generation=8)
    before = [parameter.clone() for parameter in at.model.parameters()]
    at.train()
    assert any((old != new).any() for old, new in zip(before, at.model.parameters(), strict=True))
    logged = [entry for entry in at.state.log_history if "objective/train/tokens" in entry]
    assert len(logged) == 4
    assert logged[0]["objective/mismatch/kl"] == pytest.approx(0, abs=1e-6)  # the first update is on policy
    assert logged[1]["objective/mismatch/kl"] > 1e-6  # later ones of a generated batch are not
    if objective != "dppo_binary_tv":
        assert logged[0]["objective/topk/topk_tv_mean" if "topk" in objective else "objective/centering/size"] < 1e-5


def test_the_tokens_that_vllm_could_not_score_carry_no_loss(tmp_path):
    at = trainer(tmp_path, own={"objective": "dppo_binary_tv"})
    given = inputs()
    given["sampling_per_token_logps"] = given["old_per_token_logps"].clone()
    given["sampling_per_token_logps"][0, 2] = torch.nan
    loss, gradient = loss_and_gradient(at, given)
    assert loss.isfinite()
    assert all(part.isfinite().all() for part in gradient)


@pytest.mark.parametrize(
    ("objective", "settings", "why"),
    [
        ("dppo_binary_tv", {"epsilon": 0.3}, r"epsilon = 0.3: the loss is objective dppo_binary_tv"),
        ("dppo_binary_tv", {"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold = 0.5"),
        ("dppo_binary_tv", {"top_p": 0.9}, "top_p = 0.9: tokens would be sampled from another distribution"),
        ("dppo_binary_tv", {"generation_kwargs": {"top_k": 5}}, "top_k = 5"),
        ("dppo_binary_tv", {"top_k": None}, "top_k = 50"),
        ("dppo_binary_tv", {"cache_implementation": "quantized"}, "cache_implementation = quantized"),
        ("dppo_binary_tv", {"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex = "),
        ("dppo_binary_tv", {"generation_kwargs": {"do_sample": False}}, "generation_kwargs: do_sample = False"),
        ("dppo_binary_tv", {"generation": {"min_p": 0.1}}, "min_p = 0.1"),  # GRPOConfig's None means the model's
        ("dppo_binary_tv", {"beta": 0.1}, "beta = 0.1: the objective computes the KL"),
        ("dppo_binary_tv", {"top_k": -1}, "top_k = -1.*set top_k to 0"),  # vLLM's value, which `generate` rejects
        ("dppo_binary_tv", {"loss_type": "dppo"}, "loss_type = dppo: is not known; use one of dapo, bnpo"),
        *(
            ("dppo_binary_tv", {name: value}, f"{name} = {value}: the loss is objective dppo_binary_tv")
            for name, value in {
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_max": 2.0,
                "vllm_importance_sampling_clip_min": 0.5,
                "use_bias_correction_kl": False,
                "entropy_target": 0.5,
                "entropy_coef_max": 0.9,
                "neftune_noise_alpha": 5.0,
                "label_smoothing_factor": 0.1,
            }.items()
        ),
        ("m2po", {}, "m2po cannot be a loss of TRL: it takes a number of the whole batch"),
    ],
)
def test_settings_without_effect_or_with_a_wrong_one_are_refused(tmp_path, objective, settings, why):
    with pytest.raises(ObjectiveError, match=why):
        trainer(tmp_path, own={"objective": objective}, **settings)


OTHER_DISTRIBUTION = {
    "num_beams": 2, "typical_p": 0.9, "top_h": 0.5, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "penalty_alpha": 0.5,
    "no_repeat_ngram_size": 2, "min_new_tokens": 3, "bad_words_ids": [[2]], "suppress_tokens": [2],
    "begin_suppress_tokens": [2], "sequence_bias": [[[2], 1.0]], "guidance_scale": 2.0, "forced_eos_token_id": 1,
    "exponential_decay_length_penalty": [2, 1.1], "prompt_lookup_num_tokens": 2, "stop_strings": "=",
    "num_return_sequences": 2,
}  # fmt: skip
TRLS_OWN = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "eos_token_id": 3}


@pytest.mark.parametrize(
    ("place", "settings"),
    [
        ("generation_kwargs", OTHER_DISTRIBUTION | TRLS_OWN | {"min_p": 0.1, "of_a_later_transformers": 2}),
        ("generation", OTHER_DISTRIBUTION),
    ],
)
def test_every_setting_of_another_sampling_distribution_is_named(tmp_path, place, settings):
    with pytest.raises(ObjectiveError) as error:
        trainer(tmp_path, own={"objective": "dppo_binary_tv"}, **{place: settings})
    assert [name for name in settings if f": {name} = " not in str(error.value)] == []


def test_settings_without_effect_on_the_sampling_distribution_are_accepted(tmp_path):
    neutral = {"max_new_tokens": 4, "num_beams": 1, "top_p": 1.0, "min_p": 0.0, "use_cache": True, "typical_p": 1.0,
               "length_penalty": 0.8, "early_stopping": True, "num_assistant_tokens": 5}  # fmt: skip
    models = TRLS_OWN | {"do_sample": False, "max_length": 99, "chat_format": "chatml"}  # TRL sets the first five
    trainer(tmp_path, own={"objective": "dppo_binary_tv"}, generation_kwargs=neutral, generation=models)
    trainer(tmp_path, own={"objective": "dppo_binary_tv"}, generation_kwargs={"eos_token_id": 1})  # the tokenizer's


@pytest.mark.parametrize(
    "value",
    [np.array([0, 5]), np.array([0]), np.array([]), torch.tensor([0, 5]), [np.array([1, 2])], {"a": (np.zeros(2),)}],
    ids=repr,
)
@pytest.mark.parametrize("name", ["top_k", "num_beams", "bad_words_ids", "use_cache", "of_a_later_transformers"])
def test_an_array_among_the_generation_kwargs_is_named(tmp_path, name, value):
    with pytest.raises(ObjectiveError, match=rf"generation_kwargs: {name} = .*: has an array; use numbers or lists"):
        trainer(tmp_path, own={"objective": "dppo_binary_tv"}, generation_kwargs={name: value})


def test_generation_kwargs_of_other_types_are_compared_or_named(tmp_path):
    own = {"objective": "dppo_binary_tv"}
    trainer(tmp_path, own=own, generation_kwargs={"top_p": np.float64(1), "top_k": np.int64(0)})
    for value in ([1], np.array([1, 2])):
        with pytest.raises(ObjectiveError, match=r"generation_kwargs = .*1.*: is not a dictionary; name each setting"):
            trainer(tmp_path, own=own, generation_kwargs=value)
    with pytest.raises(ObjectiveError, match=r"sequence_bias = \{\(2,\): 1\.0\}: tokens would be sampled from another"):
        trainer(tmp_path, own=own, generation_kwargs={"sequence_bias": {(2,): 1.0}})


def test_a_dropout_is_named(tmp_path):
    """TRL's disable_dropout reaches layers, but not the probability that attention passes to a function."""
    own = {"objective": "dppo_binary_tv"}
    adapter = own | {"peft_config": LoraConfig(r=2, lora_dropout=0.25, target_modules=["q_proj"])}
    with pytest.raises(ObjectiveError, match=r"q_proj\.lora_dropout\.default\.p = 0\.25: its noise differs"):
        trainer(tmp_path, own=adapter)
    trainer(tmp_path, own=adapter, disable_dropout=True)
    at = trainer(tmp_path, own=own)
    at.model.model.layers[0].self_attn.attention_dropout = 0.5
    assert "layers.0.self_attn.attention_dropout = 0.5" in _dropout_problems(at.model)[0]


def test_lists_are_not_to_be_had_from_another_sampler(tmp_path):
    own = {"objective": "score_centering", "rollout_func": lambda prompts, trainer: {}}
    with pytest.raises(ObjectiveError, match="score_centering cannot be a loss of TRL: it reads the engine's list"):
        trainer(tmp_path, own=own)
