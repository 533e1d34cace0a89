"""YAML and `--set a.b=value` to a validated `Config`; every violation in one error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dppo_megatron.common.files import write_atomic
from dppo_megatron.errors import ExpectedError

from .schema import Config


class ConfigError(ExpectedError, ValueError):
    """Every violation found, one line each: the setting, its value and the remedy."""

    def __init__(self, source: str, violations: Sequence[str]):
        self.violations = tuple(violations)
        lines = "\n".join(f"  - {v}" for v in self.violations)
        count = len(self.violations)
        super().__init__(f"{source}: {count} problem{'s' if count != 1 else ''}\n{lines}")


def read_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads `path` and applies overrides; `checks.load_config` also applies the rules between settings.

    Raises `ConfigError` naming every violation of types and names.
    """
    source = str(path)
    tree, violations = _read_file(Path(path))
    violations += _apply_overrides(tree, overrides)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        violations += [_describe(e) for e in error.errors()]
        raise ConfigError(source, violations) from None
    if violations:
        raise ConfigError(source, violations)
    return config


def save_resolved(config: Config, path: Path) -> None:
    """Writes the whole tree, defaults included, so that a run can be repeated under other defaults."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_atomic(path, text)


def with_absolute_paths(config: Config) -> Config:
    """The same for processes that start elsewhere. An engine's interpreter may be a name on PATH, so it stays."""
    sections = {
        name: section.model_copy(update={key: value.absolute() for key, value in section if isinstance(value, Path)})
        for name, section in config
        if name != "engine"
    }
    return config.model_copy(update=sections)


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as the number it is in YAML 1.2, not as YAML 1.1's text, and notes keys that a mapping repeats, of
    which YAML would keep the last and drop the others without a word.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.repeated: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, list[int]] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines.setdefault(key.value, []).append(key.start_mark.line + 1)
        for name, places in lines.items():
            if len(places) > 1:
                self.repeated.append(f"{name}: given in lines {', '.join(map(str, places))}; merge them into one")
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse(text: str) -> tuple[Any, list[str]]:
    """The value that YAML `text` stands for, and a violation for each key it repeats. Raises ValueError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data(), loader.repeated
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        place = "" if at is None else f"line {at.line + 1}, column {at.column + 1}: "
        raise ValueError(f"not valid YAML: {place}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: e.g. a date with 13 months
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None
    finally:
        loader.dispose()


def _read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Raises `ConfigError` where there is no tree to look at."""
    try:
        tree, repeated = _parse(path.read_text())
    except FileNotFoundError:
        problem = "no such file; pass the path of a YAML config, e.g. examples/quickstart/config.yaml"
        raise ConfigError(str(path), [problem]) from None
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from None
    except ValueError as error:
        raise ConfigError(str(path), [str(error)]) from None
    if not isinstance(tree, dict):
        raise ConfigError(str(path), [f"the top level must be a mapping of sections, found {type(tree).__name__}"])
    return tree, repeated


def _apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    violations = []
    for item in overrides:
        dotted, equals, text = item.partition("=")
        if not equals or not dotted:
            violations.append(f"--set {item}: write it as section.key=value")
            continue
        *parents, leaf = dotted.strip().split(".")
        node: Any = tree
        for key in parents:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
            if node is None:
                break
        if not isinstance(node, dict):
            violations.append(f"--set {item}: {dotted} does not name a setting")
            continue
        try:
            node[leaf], repeated = _parse(text) if text else ("", [])
        except ValueError as error:
            violations.append(f"--set {item}: {error}; quote text for YAML, e.g. --set '{dotted}=\"...\"'")
            continue
        violations += [f"--set {item}: {problem}" for problem in repeated]
    return violations


def _describe(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    dotted = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"{dotted}: unknown setting{_nearest(location)}"
    if error["type"] == "missing":
        return f"{dotted}: required, not set"
    return f"{dotted} = {error['input']!r}: {error['msg']}"


def _nearest(location: list[str]) -> str:
    """The valid name of the same section closest to the unknown one; failing that, of the whole tree."""
    section: type[BaseModel] | None = Config
    for key in location[:-1]:
        field = section.model_fields.get(key) if section else None
        annotation = field.annotation if field else None
        section = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    here = list(section.model_fields) if section else []
    if match := difflib.get_close_matches(location[-1], here, n=1, cutoff=0.5):
        return f"; did you mean {'.'.join([*location[:-1], match[0]])}?"
    if elsewhere := difflib.get_close_matches(location[-1], list(_leaves()), n=1, cutoff=0.75):
        return f"; did you mean {_leaves()[elsewhere[0]]}?"
    return f"; valid here: {', '.join(here)}" if here else ""


def _leaves() -> dict[str, str]:
    return {
        leaf: f"{name}.{leaf}"
        for name, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for leaf in field.annotation.model_fields
    }
