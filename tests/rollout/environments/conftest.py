import pytest
from transformers import AutoTokenizer

from tests.support.tokenizers import save_character_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_character_model(tmp_path_factory.mktemp("tokenizer") / "m"))
