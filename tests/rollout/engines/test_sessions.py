"""Sessions of an agent over real servers: however it edits its history, the bank has every sampled token once.

SESSIONS sets their number; the default takes half a minute. benchmarks/results has the counts of a thousand.
"""

import json
import os
import re
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from dppo_megatron.bank import BankReader
from dppo_megatron.bank.audit import Turn, spans_of
from dppo_megatron.cli import app
from dppo_megatron.types import POLICY, Rollout, RolloutGroup
from tests.rollout.engines.conftest import SUBJECTS
from tests.support.audit import audit
from tests.support.corruptions import FROM_THE_BANK_ALONE, FROM_THE_ENGINES_RECORD, write
from tests.support.engine_watch import Watch, groups_of
from tests.support.engines import MAX_LOGPROBS, MAX_MODEL_LEN, VOCAB
from tests.support.faults import Proxy
from tests.support.runs import config_tree, end_session, start, write_config

DENSE = [subject for subject in SUBJECTS if "dense" in subject.id]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.parametrize("server", DENSE, indirect=True)]

SAMPLES, K = 4, 4
SESSIONS = int(os.environ.get("SESSIONS", 80))
CALLS = [f'<tool_call>{{"name": "look_up", "arguments": {{"key": "{key}"}}}}</tool_call>' for key in "abcdefgh"]
# Words that a random policy samples now and then, and pairs of letters, which it also samples one by one: the text of
# many of its turns would be tokenized differently.
PAIRS = ["ab", "no", "on", "12", "  "]
WORDS = ["<pad>", "<eos>", *CALLS, "</think>", " ", "<user>", "<assistant>", "<tool>", *PAIRS]
STOPS = [20, 30]
# Thoughts are removed once another message follows, and white space around a turn is.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.first and tools %}<tool>{% endif %}"
    "{% if m.role == 'assistant' and not loop.last %}{{ (m.content.split('</think>') | last) | trim }}"
    "{% else %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' and not loop.last %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def speaking(directory: Path, model: Path) -> Path:
    """The model with a tokenizer of words of which a random policy makes calls, thoughts and white space."""
    shutil.copytree(model, directory)
    letters = [chr(ord("a") + i) for i in range(26)] + list("0123456789?.,!'")
    words = [*WORDS, *letters][:VOCAB]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    longest_first = sorted(words, key=len, reverse=True)
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first)) + r"|[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def as_the_bank_numbers_them(groups: list[RolloutGroup], watch: Watch) -> tuple[dict[Turn, Rollout], int]:
    """Return the engine's replies by the bank's turn with the same trajectory, tokens and tokens before, and the number
    of tokens that the engine read before its turns. A reply that is not in the bank gets a number of no turn."""
    said: dict[tuple, list[Rollout]] = defaultdict(list)
    for turn, rollout in watch.returned.items():
        said[*turn[:2], watch.behind[turn].tobytes(), rollout.token_ids.tobytes()].append(rollout)
    placed: dict[Turn, Rollout] = {}
    read = 0
    for group in groups:
        for i, rollout in enumerate(group.rollouts):
            for origin, number, whole, part in spans_of(group, i):
                if origin == POLICY:
                    behind = np.ascontiguousarray(whole[: -len(part.token_ids)])
                    place = (group.prompt.position, rollout.trajectory)
                    found = said[*place, behind.tobytes(), part.token_ids.tobytes()]
                    if found:  # log-probs identify a turn that was sampled twice: batches differ
                        same = (
                            k
                            for k, one in enumerate(found)
                            if np.array_equal(one.rollout_logprob, part.rollout_logprob)
                        )
                        placed[*place, number] = found.pop(next(same, 0))
                        read += len(behind)
    left = [(key[:2], rollout) for key, rollouts in said.items() for rollout in rollouts]
    return placed | {(*place, -1 - n): rollout for n, (place, rollout) in enumerate(left)}, read


def retokenised(tokenizer, turns: dict[Turn, Rollout]) -> int:
    """Count the tokens of turns whose text would be tokenized to other tokens than the policy sampled."""
    count = 0
    for rollout in turns.values():
        text = tokenizer.decode(rollout.token_ids, skip_special_tokens=False)
        again = tokenizer.encode(text, add_special_tokens=False)
        count += 0 if again == rollout.token_ids.tolist() else len(rollout.token_ids)
    return count


@dataclass(frozen=True)
class Held:
    kind: str
    groups: list[RolloutGroup]  # of the bank
    watch: Watch
    turns: dict[Turn, Rollout]  # the engine's replies, by the bank's numbers
    read: int  # tokens that it read before
    acts: Counter[str]  # of the agents
    tokenizer: PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def held(server, tmp_path_factory) -> Held:
    """`dppo-megatron sample` with the agent."""
    directory = tmp_path_factory.mktemp("sessions")
    model = speaking(server.models["a"].parent / directory.name, server.models["a"])
    prompts = [{"prompt": "what is a?", "answer": str(seed)} for seed in range(SESSIONS // SAMPLES)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    watch, did = Watch(), directory / "did.jsonl"
    with Proxy(server.url, watch) as proxy:
        tree = config_tree(directory, directory / "run", urls=(proxy.url,))
        tree["model"]["path"] = str(model)
        tree["data"] |= {"chat_template": True, "max_prompt_tokens": 64}
        tree["engine"] |= {
            **{"kind": server.kind, "max_model_len": MAX_MODEL_LEN},
            **{"max_logprobs": MAX_LOGPROBS, "secret_file": str(server.config.run.dir / "secret")},
        }
        tree["rollout"] |= {"max_response_tokens": 400, "stop_token_ids": STOPS, "topk_logprobs": K}
        tree["environment"] = {
            **{"agent": "tests.rollout.gateway.scripted:agent", "settings": {"log": str(did)}, "workers": 8},
            **{"max_turns": 16, "max_turn_tokens": 16},
        }
        config, output = write_config(tree, directory / "c.yaml"), directory / "out"
        process = start("sample", config, "--n", str(SAMPLES), "--prompts", str(len(prompts)), output=output)
        try:
            assert process.wait(120 + SESSIONS) == 0, output.read_text()
        finally:
            if process.poll() is None:
                end_session(process)
    groups = groups_of(directory / "run")
    turns, read = as_the_bank_numbers_them(groups, watch)
    acts = sum((Counter(json.loads(line)) for line in did.read_text().splitlines()), Counter())
    return Held(server.kind, groups, watch, turns, read, acts, AutoTokenizer.from_pretrained(model))


def test_no_token_is_lost_doubled_or_retokenised(held):
    checked = audit(held.groups, held.turns)
    counts, said = checked.counts, held.watch.returned
    would_be = retokenised(held.tokenizer, held.turns)
    print(f"\n{held.kind}: {dict(held.acts)}\n{checked}")
    print(f"{len(said)} turns asked of the engine ({len(held.watch.asked) - len(said)} of them twice)")
    print(f"{held.read} tokens read before them, all as the bank has them")
    print(f"0 tokens retokenised; {would_be} would be other tokens if texts were tokenized again")
    assert checked.problems == []
    assert not any(group.reward_failed.any() for group in held.groups)
    assert counts["trajectories"] == held.acts["sessions"] == SESSIONS
    assert counts["turns"] == len(said)
    assert counts["policy tokens"] == sum(len(rollout.token_ids) for rollout in said.values())
    assert counts["tokens that carry loss"] == counts["policy tokens"]
    assert held.read == sum(len(behind) for behind in held.watch.behind.values())
    assert counts["branches"] > 2 * counts["trajectories"]
    assert counts["inherited tokens"] > 0
    assert all(rollout.topk_ids.shape[1] == K for rollout in held.turns.values())
    assert would_be > 0.1 * counts["policy tokens"]
    assert len(held.acts) == 7
    assert min(held.acts.values()) >= SESSIONS // 10


@pytest.mark.parametrize("damage", FROM_THE_BANK_ALONE, ids=lambda damage: damage.__name__)
def test_the_command_names_planted_damage(held, tmp_path, damage):
    where = write(tmp_path / "bank", held.groups, damage)
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "bank")])
    *problems, _ = result.stdout.splitlines()
    assert result.exit_code == 1
    assert all(problem.startswith(where) for problem in problems), problems
    assert any(problem.endswith(f": {FROM_THE_BANK_ALONE[damage]}") for problem in problems), problems


@pytest.mark.parametrize("damage", FROM_THE_ENGINES_RECORD, ids=lambda damage: damage.__name__)
def test_damage_that_the_bank_hides_shows_against_the_record_of_the_engine(held, tmp_path, damage):
    where = write(tmp_path / "bank", held.groups, damage)
    reader = BankReader(tmp_path / "bank")
    wrong = [reader.read(entry) for entry in reader.entries(0, reader.refresh())]
    assert audit(wrong).problems == []
    problems = audit(wrong, held.turns).problems
    assert problems
    for problem in problems:
        assert problem.startswith(where)
        assert problem.endswith(FROM_THE_ENGINES_RECORD[damage])
