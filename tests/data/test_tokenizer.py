import json

import pytest

from dppo_megatron.data.tokenizer import TokenizerError, end_token_ids, load_tokenizer
from tests.support.tokenizers import save_character_model


def test_character_tokenizers_round_trip(tmp_path):
    tokenizer = load_tokenizer(save_character_model(tmp_path / "model"))
    ids = tokenizer("12+30=42\n")["input_ids"]
    assert len(ids) == 9
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+30=42\n"


def test_the_class_name_of_older_releases_works_with_any_model_type(tmp_path):
    directory = save_character_model(tmp_path / "model")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert len(load_tokenizer(directory)("1+1=")["input_ids"]) == 4


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    directory = save_character_model(tmp_path / "model")
    tokenizer = load_tokenizer(directory)
    assert end_token_ids(directory, tokenizer) == (1,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert end_token_ids(directory, tokenizer) == (1, 5, 9)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    directory = save_character_model(tmp_path / "model", vocab_size=90)
    with pytest.raises(TokenizerError, match="has 98 tokens but the model only 90"):
        load_tokenizer(directory)
    assert len(load_tokenizer(directory, vocab_size=98)) == 98


def test_a_tokenizer_that_git_lfs_stores_elsewhere_is_named(tmp_path):
    directory = save_character_model(tmp_path)
    (directory / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: a Git LFS pointer, not the file"):
        load_tokenizer(directory)


def test_missing_pieces_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"absent: no such directory"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match=r"has no tokenizer"):
        load_tokenizer(tmp_path / "empty")
    broken = save_character_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        load_tokenizer(broken)
    (broken / "tokenizer.json").unlink()  # transformers would ask for sentencepiece
    with pytest.raises(TokenizerError, match=r"cannot be loaded: no tokenizer\.json; copy the model's there$"):
        load_tokenizer(broken)


def test_without_an_end_token_nothing_would_stop(tmp_path):
    directory = save_character_model(tmp_path / "model")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TokenizerError, match="no end-of-sequence token"):
        load_tokenizer(directory)


@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_model_of_a_thousand_million_layers_is_refused_before_transformers_lists_them(tmp_path, part):
    directory = save_character_model(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    sizes = {"num_hidden_layers": 10**9}
    (directory / "config.json").write_text(json.dumps(config | (sizes if part is None else {part: sizes})))
    with pytest.raises(TokenizerError, match=r"config.json: num_hidden_layers = 1000000000: more than any model has"):
        load_tokenizer(directory)
