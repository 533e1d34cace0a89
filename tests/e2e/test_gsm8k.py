"""Real GSM8K questions through the example's config, with a tiny random policy and a byte-level tokenizer."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from dppo_megatron.bank import BankReader
from dppo_megatron.rollout.rewards.gsm8k import gsm8k
from dppo_megatron.types import Prompt
from tests.support.actor_cases import TINY
from tests.support.runs import records, run, steps_done, write_config

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "tests" / "data" / "gsm8k_sample.jsonl"
ASKED = 4  # of the questions: their answers, 72, 10, 5 and 42, differ
CHAT = "{% for m in messages %}<|user|>{{ m.content }}<|assistant|>{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Qwen3 of 0.2 M parameters that knows every byte and a chat format.

    It has 16 tokens for each answer in a box, so that a random policy is right now and then and the example's own
    verifier has something to tell apart.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from dppo_megatron.hf import make_random_hf_model

    special = ["<pad>", "<eos>", "<|user|>", "<|assistant|>"]
    boxes = [f"{letter}\\boxed{{{answer}}}" for answer in (72, 10, 5, 42) for letter in "abcdefghijklmnop"]
    vocabulary = {t: i for i, t in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *boxes])}
    directory = tmp_path_factory.mktemp("gsm8k") / "model"
    config = {
        **TINY["answering"],
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": len(vocabulary) + 12,  # a model may have more rows than its tokenizer has tokens
        **{"num_attention_heads": 4, "head_dim": 32, "tie_word_embeddings": True},
    }
    make_random_hf_model(directory, config, seed=1)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=special[2:],
        chat_template=CHAT,
    ).save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_two_steps_of_the_example_on_real_questions_and_its_own_verifier(model, tmp_path):
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(QUESTIONS.read_text().splitlines(keepends=True)[:ASKED]))
    tree = yaml.safe_load((ROOT / "examples" / "gsm8k" / "config.yaml").read_text())
    tree["run"]["dir"] = str(tmp_path / "run")
    tree["model"] = {"path": str(model), "dtype": "fp32"}
    tree["parallel"] = {"world_size": 2, "tensor": 2, "sequence": True}
    tree["data"] |= {"train": str(asked), "eval": str(QUESTIONS), "max_prompt_tokens": 900}
    tree["rollout"] |= {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 16, "topk_logprobs": 8}
    tree["objective"] = {"name": "dppo_topk_tv", "settings": {"delta": 0.2}}
    tree["train"] |= {"steps": 2, "updates_per_step": 2}
    tree["optimizer"]["warmup_updates"] = 2
    tree["engine"] |= {"count": 1, "dtype": "fp32", "max_model_len": 1024, "kv_cache_bytes": 1 << 28}
    tree["weight_sync"] = {"probe_tolerance": 1e-4}
    tree["checkpoint"] = {"every": 0}
    run("train", write_config(tree, tmp_path / "c.yaml"))
    assert steps_done(tmp_path / "run") == [1, 2]
    trained = [r for r in records(tmp_path / "run") if "time/step_s" in r]
    assert all(r["mismatch/max_abs_logprob_difference"] < 1e-4 for r in trained)
    assert all(0 <= r["topk/tail_mass_rollout"] <= 1 for r in trained)
    assert all(r["train/grad_norm"] > 0 for r in trained)
    assert list((tmp_path / "run" / "wandb").rglob("*.wandb"))

    tokenizer = AutoTokenizer.from_pretrained(model)
    bank, found = BankReader(tmp_path / "run" / "bank"), []
    for group in map(bank.read, bank.entries(0, bank.refresh())):
        texts = [tokenizer.decode(rollout.token_ids, skip_special_tokens=True) for rollout in group.rollouts]
        assert group.rewards.tolist() == [gsm8k(group.prompt, text) for text in texts]
        found += group.rewards.tolist()
    assert len(found) == 2 * 4 * 4
    assert 0 < sum(found) < len(found)


def test_the_verifier_scores_the_references_themselves():
    """The example's own reward on its own data: every reference solution is right."""
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    prompts = [Prompt(i, i, [], row["question"], row["answer"]) for i, row in enumerate(rows)]
    assert all(gsm8k(p, p.answer) == 1.0 for p in prompts)
