"""tools/check_words.py finds the retired words in every spelling, and only those."""

from pathlib import Path

import check_words
import pytest

ROOT = Path(__file__).parents[2]

# With a tilde inside, so that this file passes the check it tests.
RETIRED = [
    text.replace("~", "")
    for text in (
        *("Spo~iltSample", "spo~ilt_groups", "_le~nt", "le~nt to the engines", "VOU~CHED", "PATI~ENCE"),
        *("call_pati~ently", "called~ off", "CALL~_OFF", "pla~yed_server", "a to~rn line"),
    )
]
ORDINARY = ("equivalent", "a patient reader", "recall_offset", "displayed_server", "tornado", "cut off")


@pytest.mark.parametrize("text", RETIRED)
def test_a_retired_word_is_found_with_its_line(text, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(f"fine\n{text}\n")
    assert check_words.main(tmp_path) == 1
    assert "docs/page.md:2:" in capsys.readouterr().out


@pytest.mark.parametrize("text", ORDINARY)
def test_an_ordinary_word_is_not(text):
    assert not check_words.find_words(text)


def test_a_test_with_an_unclear_name_is_named(tmp_path, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("def test_what_is_said(): ...\ndef test_the_data_is_read(): ...\n")
    assert check_words.main(tmp_path) == 1
    assert "tests/test_x.py:1: test_what_is_said: name the object and the verb" in capsys.readouterr().out


def test_a_file_name_counts_and_the_changelog_may_use_retired_words(tmp_path):
    (tmp_path / "dppo_megatron").mkdir()
    (tmp_path / "CHANGELOG.md").write_text(RETIRED[0])
    assert check_words.main(tmp_path) == 0
    (tmp_path / "dppo_megatron" / f"{RETIRED[1]}.py").touch()
    assert check_words.main(tmp_path) == 1


def test_a_frequent_word_is_reported_with_its_rate(tmp_path, capsys):
    (tmp_path / "dppo_megatron").mkdir()
    code = tmp_path / "dppo_megatron" / "x.py"
    code.write_text('"""Return what fits."""\n\nwhat = "what is in a string does not count"  # what remains\n')
    assert check_words.main(tmp_path) == 1
    assert "code: 'what' 400.00 times in 1,000 words, at most 1.2" in capsys.readouterr().out
    code.write_text('"""Return the rest."""\n')
    (tmp_path / "README.md").write_text("The list lies in the file.\n\n```\nwhat\n```\n")
    assert check_words.main(tmp_path) == 1
    assert capsys.readouterr().out.count("times in 1,000 words") == 1


def test_a_vague_name_is_listed_and_its_rate_is_limited(tmp_path, capsys):
    source = (
        "def found(own):\n    self.kept_ = given = 1\n    return [of_rank for of_rank in given]\n\ndef read(): pass"
    )
    assert sorted(check_words.vague_names(source)) == [
        (1, "found"),
        (1, "own"),
        (2, "given"),
        (2, "kept_"),
        (3, "of_rank"),
    ]
    (tmp_path / "dppo_megatron").mkdir()
    (tmp_path / "dppo_megatron" / "x.py").write_text(source)
    assert check_words.main(tmp_path) == 1
    assert "names: 1250.0 vague ones in 1,000 lines" in capsys.readouterr().out
    check_words.print_names(tmp_path)
    assert "dppo_megatron/x.py:1: found" in capsys.readouterr().out
