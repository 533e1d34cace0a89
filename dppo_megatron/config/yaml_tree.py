"""Parses YAML into plain values with YAML 1.2 scalars, and rejects repeated, hidden and huge content."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import yaml

from dppo_megatron.errors import bounded

MAX_BYTES = 1 << 18
DEEPEST = 32
_MAX_VALUES = 1 << 20  # characters and values; alias content counts each time
_STR = "tag:yaml.org,2002:str"


class YamlError(ValueError):
    """Raised for text that is not YAML or is unsuitable for a config. The message has the position."""


def parse(text: str) -> tuple[Any, list[str]]:
    """Return the value of YAML `text`, and a violation for each repeated key. Raises `YamlError`."""
    if len(text) > MAX_BYTES:
        raise YamlError(f"{len(text)} characters; a config has at most {MAX_BYTES}")
    loader = None
    try:
        loader = _Loader(text)
        return _apart(loader.get_single_data()), loader.repeated
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        place = "" if at is None else f"line {at.line + 1}, column {at.column + 1}: "
        setting = f"{bounded('.'.join(loader.path), 200)}: " if loader and loader.path else ""
        prefix = "" if at is None else (at.buffer or "")[at.pointer - at.column : at.pointer + 1]  # up to the problem
        tab = re.search(r"^ *\t|\t$", prefix)
        problem = "a tab, which YAML does not allow here; use spaces" if tab else plain_words(error.problem or "")
        raise YamlError(f"not valid YAML: {place}{setting}{problem}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:
        raise YamlError(f"not valid YAML: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()


def plain_words(problem: str) -> str:
    """Return a PyYAML problem in config terms; other problems are unchanged."""
    return next((words for pattern, words in _PYYAML if re.search(pattern, problem)), problem)


def read_words(file: str) -> list[tuple[str, str]]:
    """Return (error kind, sentence) for each line `KIND -> SENTENCE` in a file in this folder."""
    lines = Path(__file__).with_name(file).read_text().splitlines()
    return [(kind, words) for kind, _, words in (line.partition(" -> ") for line in lines)]


def _apart(value: Any) -> Any:
    """Copy parts that two aliases share, so that an override changes only one place."""
    if isinstance(value, dict):
        return {key: _apart(inner) for key, inner in value.items()}
    return [_apart(inner) for inner in value] if isinstance(value, list) else value


class _Loader(yaml.SafeLoader):
    """Records repeated mapping keys. PyYAML would silently use the last value."""

    def __init__(self, text: str):
        super().__init__(_HIDDEN.sub(_STAND_IN, text))  # PyYAML's error would not name the setting
        self._text = text
        self.repeated: list[str] = []
        self.path: list[str] = []  # names of the current sections and setting
        self._depth = 0
        self._values = 0
        self._anchor_sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        named = isinstance(index, yaml.ScalarNode)  # the node is the value of this key
        self.path += [index.value] if named else []
        event = self.peek_event()
        if getattr(event, "tag", None) not in (None, "!", _STR):
            raise _refused("a tag; write only the value", event)
        start_count, self._depth = self._values, self._depth + 1
        if self._depth > DEEPEST:
            raise _refused(f"nested more than {DEEPEST} levels deep", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._anchor_sizes:
                raise _refused(f"*{event.anchor} contains itself", event)
            self._values += self._anchor_sizes[id(node)]
        else:
            self._values += 1
            if isinstance(node, yaml.ScalarNode):
                self._values += len(node.value)
                if hidden := _HIDDEN.search(node.value):
                    if hidden[0] == _STAND_IN:
                        hidden = _HIDDEN.search(self._text, node.start_mark.index) or hidden
                    raise _refused(f"contains the control character U+{ord(hidden[0]):04X}", event)
                if node.style is None and node.value[:1] in tuple("“”„‘’«"):
                    raise _refused(f"begins with {node.value[0]}, which is no quote in YAML; write \" or '", event)
            self._anchor_sizes[id(node)] = self._values - start_count
        if named:
            self.path.pop()
        if self._values > _MAX_VALUES:
            raise _refused("aliases (*name) stand for more values than a config has", event)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        pairs_by_name: dict[str, list[tuple[yaml.ScalarNode, yaml.Node]]] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if invisible := next((c for c in key.value if not c.isprintable()), None):
                    raise _refused(f"this name has the invisible character U+{ord(invisible):04X}; use blanks", key)
                if key.style is None and re.search(r":\S", key.value) and not value.value:
                    raise _refused(f"no blank after the colon of {bounded(key.value, 60)}; write one", key)
                pairs_by_name.setdefault(key.value, []).append((key, value))
        for name, pairs in pairs_by_name.items():
            if len(pairs) > 1:
                lines = ", ".join(str(key.start_mark.line + 1) for key, _ in pairs)
                self.repeated.append(f"{'.'.join([*self.path, name])}: given in lines {lines}; merge them into one")
                # Merge all repeated sections, so that no setting in them counts as missing.
                inner = [pair for _, value in pairs if isinstance(value, yaml.MappingNode) for pair in value.value]
                if inner:
                    node.value.append((pairs[0][0], yaml.MappingNode("tag:yaml.org,2002:map", inner)))
        return node


_PYYAML = read_words("yaml_words.txt")  # problem pattern -> sentence
# These characters are invisible, or UTF-8 cannot encode them. Line breaks and tabs are text.
_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ud800-\udfff\ufdd0\ufffe\uffff]")
_STAND_IN = "\ufdd0"  # a character that no text contains


def _refused(problem: str, at: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast(yaml.Mark, at.start_mark))


def _read_scalars_as_yaml_1_2() -> None:
    """Read 1e-4 as a number, and 1:30, 2001-01-31 and = as text, unlike YAML 1.1, which also reads 010 as 8."""
    dates = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
    numbers = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in numbers | dates]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    integer = r"[-+]?(0|[1-9][0-9_]{0,39}|0b[01]{1,64}|0x[0-9a-fA-F]{1,16})"
    real = r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
    real += r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    for tag, pattern in zip(sorted(numbers, reverse=True), (integer, real), strict=True):
        _Loader.add_implicit_resolver(tag, re.compile(f"^({pattern})$"), list("-+.0123456789"))


_read_scalars_as_yaml_1_2()
