"""Errors of pydantic and of the YAML parser reach the user as sentences with a remedy."""

import ast
import inspect
import re
from typing import get_args

import pytest
import yaml
from pydantic_core import core_schema
from yaml import composer, constructor, parser, scanner

from dppo_megatron.config import Config
from dppo_megatron.config.load import plain_words
from dppo_megatron.config.yaml_tree import YamlError, parse
from dppo_megatron.config.yaml_tree import plain_words as yaml_words

# First word of errors -> kind of value that raises them. Config has none of these kinds.
OTHER_KINDS = {
    "json": "json", "model_attributes": "dataclass", "dataclass": "dataclass", "named": "named-tuple", "enum": "enum",
    "frozen_dict": "frozen-dict", "frozen_set": "frozen-set", "ordered": "ordered-dict", "counter": "counter",
    "mapping": "mapping", "deque": "deque", "set": "set", "bytes": "bytes", "date": "date", "time": "time",
    "datetime": "datetime", "timezone": "datetime", "time_delta": "timedelta", "is_subclass": "is-subclass",
    "callable": "callable", "url": "url", "uuid": "uuid", "decimal": "decimal", "fraction": "fraction",
    "complex": "complex", "multiple_argument": "arguments", "unexpected": "arguments", "arguments": "arguments",
    "missing_argument": "arguments", "missing_keyword": "arguments", "missing_positional": "arguments",
    "missing_sentinel": "missing-sentinel", "ellipsis": "ellipsis", "default_factory": "default-factory",
}  # fmt: skip
# Only of objects in Python that YAML cannot write, or of changes to a made section.
NOT_OF_YAML = {
    "no_such_attribute", "get_attribute_error", "needs_python_object", "recursion_loop", "recursion_depth_exceeded",
    "frozen_field", "frozen_instance",
}  # fmt: skip


def kinds_of(schema) -> set[str]:
    """Return the kinds of values in a schema."""
    if isinstance(schema, dict):
        kinds = set().union(*map(kinds_of, schema.values()))
        return kinds | ({schema["type"]} if isinstance(schema.get("type"), str) else set())
    return set().union(*map(kinds_of, schema)) if isinstance(schema, (list, tuple)) else set()


def test_every_error_of_pydantic_that_a_config_can_raise_has_its_sentence():
    kinds, words = kinds_of(Config.__pydantic_core_schema__), {}
    for error in set(get_args(core_schema.ErrorType)) - NOT_OF_YAML:
        of = [kind for word, kind in OTHER_KINDS.items() if error.startswith(f"{word}_") or error == word]
        if not of or kinds & set(of):
            words[error] = plain_words({"type": error, "input": "x", "msg": "PYDANTIC", "ctx": Context()})
    assert {"missing", "bool_parsing", "literal_error"} <= words.keys()
    assert {error for error, sentence in words.items() if "PYDANTIC" in sentence or not sentence} == set()


class Context(dict):
    def __missing__(self, key):
        return f"<{key}>"


def problems_of_pyyaml() -> list[str]:
    """Return the texts with which PyYAML's parser and safe constructor reject a document."""
    sources = [*map(inspect.getsource, (scanner, parser, composer)), inspect.getsource(constructor.SafeConstructor)]
    texts = []
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error") and len(node.args) >= 3:
            texts += [part.value for part in ast.walk(node.args[2]) if isinstance(part, ast.Constant)][:1]
    return texts


def test_every_problem_of_pyyaml_has_its_sentence():
    texts = problems_of_pyyaml()
    assert len(texts) > 40
    assert "mapping values are not allowed here" in texts
    assert [text for text in texts if yaml_words(text) == text] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "run:\n  dir: x\n model:\n  path: y\n",
            "line 3, column 2: indented differently from the lines",
        ),
        (
            "model:\n  path: y\n   dtype: fp32\n",
            "line 3, column 9: model: a second ': ' in one line, or a line",
        ),
        ("run: {dir: x\nmodel: 3\n", "is not closed before this place"),
        ('run: {dir: "x}\n', "a quote is not closed"),
        ('a: "\\q"\n', "a backslash in double quotes begins an escape"),
        ("a: @x\n", "put it in quotes"),
        ("a: 1\n---\nb: 2\n", "which begin another document"),
        ("a: |x\n", "only a line break may follow"),
        ("a: 1\nb\nc: 2\n", "a name without a value; write NAME: VALUE"),
        ("<<: 3\n", "<< merges only sections"),
        ("[a]: 3\n", "a name must be text"),
    ],
)
def test_yaml_is_explained(text, says):
    with pytest.raises(YamlError, match=re.escape(says)):
        parse(text)
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load(text)
