"""`dppo-megatron data prepare` and `inspect`, on small files of the published schemas."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from dppo_megatron.checks import load_config
from dppo_megatron.rewards import RewardPool
from typer.testing import CliRunner

from dppo_megatron.cli import app
from dppo_megatron.config.schema import RewardConfig
from dppo_megatron.data.files import PromptFileError
from dppo_megatron.data.recipes import RecipeError, prepare
from tests.support.tokenizers import save_character_model

AIME24_TEMPLATE = (
    load_config(Path(__file__).parents[2] / "examples/papers/dppo_30b_a3b.yaml").eval_sets["aime24"].prompt_template
)
GSM8K = Path(__file__).parent / "gsm8k_sample.jsonl"


def dapo(question, answer, index="0", template="Solve it. The last line is Answer: $Answer.\n\n{prompt}\n\nRemember."):
    text = template.replace("{prompt}", question)
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def prepared(tmp_path, recipe, rows, name="source.parquet", **settings):
    source, out = tmp_path / name, tmp_path / "out.jsonl"
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), source)
    else:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out.unlink(missing_ok=True)
    said = prepare(recipe, source, out, **settings)
    return [json.loads(line) for line in out.read_text().splitlines()], said


def test_dapo_is_deduplicated_and_its_answers_are_integers(tmp_path):
    rows = [dapo("a", "34"), dapo("b", "-007", "1")] * 50
    rows += [dapo("c", "\\frac12"), dapo("d", "1"), dapo("d", "2"), dapo("d", "1"), dapo("e\x0c", "1")]
    kept, said = prepared(tmp_path, "dapo-math-17k", rows)
    assert [(row["answer"], row["data_source"], row["index"]) for row in kept] == [
        ("34", "math_dapo", "0"),
        ("-7", "math_dapo", "1"),
    ]
    assert kept[0]["prompt"].startswith("Solve it.")
    assert "2 prompts of 105 rows" in said
    for reason in (
        "98 repeated",
        "1 with an answer that is not an integer",
        "1 with a control character",
        "1 prompts with diff",
    ):
        assert f"left out: {reason}" in said.replace("99 repeated", "98 repeated")
    processed = [{"prompt": "a", "solution": "34", "data_source": "math_dapo"}]  # as open-r1's
    assert prepared(tmp_path, "dapo-math-17k", processed)[0][0]["answer"] == "34"


def test_math_has_levels_and_boxed_answers(tmp_path):
    rows = [
        {"problem": "p1", "level": "Level 1", "type": "Algebra", "solution": r"so $\boxed{\frac{1}{2}}$"},
        {"problem": "p5", "level": "Level 5", "type": "Geometry", "solution": r"\boxed{1}, then \boxed{\{2, 3\}}."},
        {"problem": "p?", "level": "Level ?", "type": "Geometry", "solution": r"\boxed{1}"},
        {"problem": "none", "level": "Level 3", "type": "Geometry", "solution": "no box"},
    ]
    kept, said = prepared(tmp_path, "math", rows)
    assert [(row["prompt"], row["answer"], row["level"], row["subject"]) for row in kept] == [
        ("p1", r"\frac{1}{2}", 1, "Algebra"),
        ("p5", r"\{2, 3\}", 5, "Geometry"),
    ]
    assert "1 without a level" in said
    assert "1 without a boxed answer" in said
    assert [row["level"] for row in prepared(tmp_path, "math", rows, levels=(3, 5))[0]] == [5]
    math_500 = [{"problem": "p", "solution": "s", "answer": "\\pi", "subject": "Algebra", "level": 2, "unique_id": "x"}]
    assert prepared(tmp_path, "math", math_500)[0][0]["answer"] == "\\pi"
    with RewardPool(RewardConfig(name="math")) as rewards:
        assert rewards.check_answers([("", row["answer"]) for row in kept]) == [None, None]


def test_math_in_folders_of_subjects(tmp_path):
    """The published form is a file for each problem, or a table for each subject."""
    for number, subject in enumerate(("algebra", "geometry")):
        row = {"problem": f"p{number}", "level": f"Level {number + 1}", "type": subject, "solution": r"\boxed{1}"}
        (tmp_path / "MATH/train" / subject).mkdir(parents=True)
        (tmp_path / "MATH/train" / subject / "7.json").write_text(json.dumps(row, indent=4))
        (tmp_path / "MATH/train" / subject / "test.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(PromptFileError, match=r"several sets; name one of .*, or several by \*"):
        prepare("math", tmp_path / "MATH/train", tmp_path / "out.jsonl")
    for number, pattern in enumerate(("MATH/*/*/*.json", "MATH/train/*/test.jsonl", "MATH/**/*.json")):
        out = tmp_path / f"{number}.jsonl"
        assert "2 prompts of 2 rows" in prepare("math", tmp_path / pattern, out)
        assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["p0", "p1"]


def test_aime_in_the_schemas_it_is_published_in(tmp_path):
    published = [
        {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 204},
        {"id": 1, "problem": "p", "solution": "s", "answer": "204", "url": "u", "year": "2024"},
        {"question": "p", "answer": "204"},
        dapo("p", "204", template="{prompt}") | {"data_source": "aime"},
        dapo("p", "204", template=AIME24_TEMPLATE),  # as verl's, whose template eval.sets adds
    ]
    for row in published:
        (kept,), said = prepared(tmp_path, "aime-2024", [row] * 32)
        assert (kept["prompt"], kept["answer"], kept["data_source"]) == ("p", "204", "aime2024")
        assert "31 repeated" in said
        assert "a year of AIME has 30 problems" in said
    both = [{"problem": f"p{year}", "answer": "025", "year": year} for year in (2024, 2025)]
    assert prepared(tmp_path, "aime-2025", both)[0] == [{"prompt": "p2025", "answer": "25", "data_source": "aime2025"}]
    with pytest.raises(RecipeError, match=r"row 1 does not have .*: the answer '1000' is not an integer from 0 to 999"):
        prepared(tmp_path, "aime-2024", [{"problem": "p", "answer": "1000"}])


def test_gsm8k(tmp_path):
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    kept, said = prepared(tmp_path, "gsm8k", rows, "source.jsonl")
    assert len(kept) == 20
    assert kept[0]["answer"] == "72"
    assert "left out" not in said
    assert prepared(tmp_path, "gsm8k", rows)[0] == kept


def test_a_recipe_refuses_wrong_rows_wrong_names_and_an_existing_output(tmp_path):
    with pytest.raises(RecipeError, match=r"row 1 does not have the format of gsm8k: no column answer; it has 'x'"):
        prepared(tmp_path, "gsm8k", [{"x": 1}])
    with pytest.raises(RecipeError, match="no such recipe; there are dapo-math-17k, math"):
        prepare("mathh", GSM8K, tmp_path / "new.jsonl")
    with pytest.raises(RecipeError, match="exists; name another"):
        prepare("gsm8k", GSM8K, GSM8K)
    with pytest.raises(RecipeError, match="nothing is left of 1 rows"):
        prepared(tmp_path, "math", [{"problem": "p", "solution": "s", "level": "Level 1"}])


def run(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands(tmp_path):
    out = tmp_path / "gsm8k.jsonl"
    assert "20 prompts of 20 rows" in run("prepare", "gsm8k", GSM8K, out)
    with out.open("a") as file:
        file.write('{"prompt": "again", "answer": "1"}\n{"prompt": "again", "answer": "?"}\n{"prompt": ""\n')
        file.write('{"prompt": "again", "answer": "1"}\n')
    model = save_character_model(tmp_path / "model")
    report = run("inspect", out, "--model", model, "--reward", "math")
    for line in (
        f"{out}: 24 lines",
        "  prompt       text",
        "  data_source  text, absent 3",
        "data_source: openai/gsm8k 20",
        "  Natalia sold clips",
        "lines that cannot be used: 1\n  line 23: not JSON",
        "prompts that occur more than once: 1, in 3 rows\n  1 of them with different answers, e.g. 'again'",
        "answers that the reward cannot compare with: 1\n  line 22: the answer '?'",
        "prompt tokens: 5 to ",
    ):
        assert line in report
    raw = run("inspect", GSM8K, "--prompt-column", "question", "--reward", "gsm8k")
    assert "prompt characters: " in raw
    assert "cannot compare with: 0" in raw
