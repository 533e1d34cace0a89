"""`dppo-megatron init`: its files are valid, train unchanged, and serves the first environment of the docs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dppo_megatron.data.tokenizer import load_tokenizer
from tests.support.runs import records, run, steps_done

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Iterator[Path]:
    """Relative to the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("at"))
        said = run("init", "sub/first").stdout
        assert "data.train: 64 prompts from sub/first/train.jsonl" in said
        assert "sub/first: ready" in said
        assert "dppo-megatron train sub/first/config.yaml" in said
        yield Path("sub/first")


@pytest.mark.parametrize(
    ("directory", "problem"),
    [
        ("sub/first", "already exists"),
        ("sub/first/reward.py", "use a relative path"),
        ("my-run", "of letters, digits"),
        ("2024", "do not begin with a digit"),
        (".", "use a relative path"),
        ("json", "Python has another module of this name"),
    ],
)
def test_a_directory_that_cannot_be_one_is_refused_and_left_as_it_is(project, directory, problem):
    before = {path: path.stat().st_mtime_ns for path in Path("sub").rglob("*")}
    refused = run("init", directory, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: DIR = {directory}: ")
    assert problem in refused.stderr
    assert before == {path: path.stat().st_mtime_ns for path in Path("sub").rglob("*")}
    assert not {"my-run", "2024", "json"} & {path.name for path in Path().iterdir()}


def test_the_chat_template_shows_roles_tools_and_calls(project):
    tokenizer = load_tokenizer(project / "model")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "<1>"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == (
        '<|im_start|>system\nTools: [{"name": "f"}]<|im_end|>\n<|im_start|>system\nBe short.<|im_end|>\n'
        '<|im_start|>user\n<1><|im_end|>\n<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"x": 1}}'
        "</tool_call><|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 5


def test_the_first_environment_of_the_docs_goes_with_it(project):
    """The class stands in docs/environments.md and in the example that trains with it."""
    block = re.search(r"```python\n(# my_table.py.*?)```", (ROOT / "docs/environments.md").read_text(), re.DOTALL)[1]
    assert (ROOT / "examples/table/my_table.py").read_text().endswith(block.split("\n", 1)[1])
    Path("my_table.py").write_text(block)
    Path("prices.json").write_text('{"tea": 2.5}')
    settings = ["--set", "environment.settings={file: prices.json}"]
    table = ["--set", "environment.name=my_table:Table", *settings]
    refused = run("validate", project / "config.yaml", *table, check=False)
    assert "277 tokens, data.max_prompt_tokens is 128; raise it" in refused.stderr  # the prompts show the tools
    settings += ["--set", "data.max_prompt_tokens=320"]
    run("validate", project / "config.yaml", "--set", "environment.name=my_table:Table", *settings)
    refused = run("validate", project / "config.yaml", "--set", "environment.name=my_table:Tabel", check=False).stderr
    assert "has no 'Tabel'; did you mean 'Table'" in refused


@pytest.mark.slow
def test_it_trains_as_it_is(project):
    said = run("train", project / "config.yaml", "--set", "train.steps=2").stdout
    assert "waiting for the first step: engine-0 loads the model" in said
    assert steps_done(project / "run") == [1, 2]
    assert all(0 < r["rollout/reward_mean"] < 1 for r in records(project / "run") if "rollout/reward_mean" in r)
