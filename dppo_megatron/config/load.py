"""Reads YAML and `--set a.b=value` into a validated `Config`, and reports every violation in one error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from dppo_megatron.common.files import write_atomic
from dppo_megatron.errors import ExpectedError, bounded, listing, shown
from dppo_megatron.objectives.settings import OTHER_NAMES

from .schema import Config
from .yaml_tree import DEEPEST, MAX_BYTES, parse, read_words


class ConfigError(ExpectedError, ValueError):
    """Lists every violation on a separate line: the setting, the value and the remedy.

    Unknown names with a suggested setting come first, e.g. from another trainer's config. The other lines do not
    shorten them.
    """

    def __init__(self, source: str, violations: Sequence[str]):
        named = {line for line in violations if "unknown setting; here " in line or "; did you mean " in line}
        self.violations = tuple(sorted(violations, key=lambda line: line not in named))
        super().__init__(listing(source, self.violations, len(named)))


def read_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read `path` and apply overrides. `checks.load_config` also applies the rules between settings.

    For the config.yaml in a run directory, `run.dir` becomes that directory, because a run may be moved or copied.
    Raises `ConfigError` naming every violation of types and names.
    """
    source = str(path)
    tree, violations = read_tree(Path(path))
    if run_dir := _run_with(Path(path)):
        run = tree.setdefault("run", {})
        if isinstance(run, dict):
            run["dir"] = str(run_dir)
    violations += _apply_overrides(tree, overrides)
    return validated(tree, source, violations)


def run_of(path: Path) -> Path:
    """Return a config's run directory, as `read_config` does. Return any other path unchanged."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return path
    return _run_with(path) or read_config(path).run.dir


def _run_with(config: Path) -> Path | None:
    """Return the run directory if `config` is the config.yaml in it, else None."""
    directory = config.absolute().parent
    written = any((directory / name).exists() for name in ("run.lock", "files.json"))  # an evaluation has no lock
    return directory if written and config.name == "config.yaml" else None


def validated(tree: dict[str, Any], source: str, violations: Sequence[str] = ()) -> Config:
    """Validate `tree`. Raises `ConfigError` naming the given violations and all violations of types and names."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(source, [*violations, *map(_describe, error.errors())]) from None
    if violations:
        raise ConfigError(source, violations)
    return config


def save_resolved(config: Config, path: Path) -> None:
    """Write the whole tree with all defaults, so that a later version with other defaults can repeat the run."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_atomic(path, text)


def with_absolute_paths(value: Any) -> Any:
    """Return `value` with absolute paths, for processes in other directories.

    An engine's interpreter may be a name on PATH, so it stays unchanged.
    """
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: with_absolute_paths(part) for name, part in value if name != "python"})
    if isinstance(value, dict):
        return {name: with_absolute_paths(part) for name, part in value.items()}
    return tuple(map(with_absolute_paths, value)) if isinstance(value, tuple) else value


def with_settings(config: Config, **sections: Any) -> Config:
    """Return `config` with other sections, or with other settings in a section, e.g. `train={"steps": 3}`."""
    changed = {
        name: getattr(config, name).model_copy(update=value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return config.model_copy(update=changed)


def read_tree(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings tree in a file, and a violation for each repeated key.

    Raises `ConfigError` if the file contains no tree.
    """
    config = "a YAML config, e.g. examples/quickstart/config.yaml"
    other = "" if path.suffix in ("", ".yaml", ".yml") else f"; pass {config}"
    try:
        if path.is_fifo():
            raise ValueError("is a pipe; pass the path of a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"a config has at most {MAX_BYTES} bytes; pass the path of a config")
        tree, repeated = parse(content.decode())
    except (FileNotFoundError, IsADirectoryError):
        problem, inside = "a directory, as an empty path is" if path.is_dir() else "no such file", path / "config.yaml"
        meant = inside if inside.is_file() else f"the path of {config}"
        raise ConfigError(str(path), [f"{problem}; pass {meant}"]) from None
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}; correct its permissions"]) from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(str(path), [f"line {line}: not UTF-8 ({error.reason}); save it as UTF-8"]) from None
    except ValueError as error:
        raise ConfigError(str(path), [str(error) + other]) from None
    if not isinstance(tree, dict) or (other and not tree.keys() & Config.model_fields.keys()):
        kind = "none of them" if isinstance(tree, dict) else type(tree).__name__
        raise ConfigError(str(path), [f"the top level must be a mapping of sections, found {kind}{other}"])
    return tree, repeated


def _apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> Iterator[str]:
    for item in overrides:
        dotted, equals, text = item.partition("=")
        item, dotted = bounded(item, 200), dotted.strip()
        if not equals or not dotted:
            yield f"--set {item}: write it as section.key=value"
            continue
        *parents, leaf = dotted.split(".")
        node: Any = tree if len(parents) < DEEPEST else None
        for key in parents:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
            if node is None:
                break
        if not isinstance(node, dict):
            yield f"--set {item}: {bounded(dotted, 100)} does not name a setting"
            continue
        try:
            node[leaf], repeated = parse(text) if text else ("", [])
        except ValueError as error:
            yield f"--set {item}: {error}; quote text for YAML, e.g. --set '{bounded(dotted, 100)}=\"...\"'"
            continue
        yield from (f"--set {item}: {problem}" for problem in repeated)


def _describe(error: Any) -> str:
    location, value = [str(part) for part in error["loc"]], error["input"]
    dotted = ".".join(bounded(part, 60) for part in location)
    if error["type"] == "extra_forbidden":
        return f"{dotted}: unknown setting{_nearest(location, value)}"
    if error["type"] == "missing":
        needed = [name for name, field in _fields(location).items() if field.is_required()]
        return f"{dotted}: required, not set" + "".join(f"; set {dotted}.{name}" for name in needed)
    reason = plain_words(error)
    name, names = (str(value).lower(), _ALIASES) if dotted == "objective.name" else (location[-1], _NAMES)
    if location[0] == "objective" and reason.startswith("unknown ") and "." in names.get(name, ""):
        reason = f"unknown here; did you mean {names[name]}?"
    elif error["type"] == "model_type":
        first = next(iter(_fields(location)), None)  # None: a list entry
        reason = "a section of settings, not a value; write " + (f"e.g. {dotted}.{first}" if first else "{NAME: VALUE}")
        reason = "no blank after the colon; write one" if re.match(r"\w+:\S", str(value)) else reason
    return f"{dotted} = {shown(value)}: {reason}"


def plain_words(error: Any) -> str:
    """Return why pydantic rejects a value, without Python type names."""
    kind, value = error["type"], error["input"]
    if kind == "tuple_type":
        if isinstance(value, int):
            return f"must be a list; write [{value}] for one entry, e.g. [1, 2, 3] for several"
        entries = value.split() if isinstance(value, str) else ["..."]
        return f"must be a list; write [{value if 'setup' in error.get('loc', ()) else ', '.join(entries)}]"
    if kind == "dict_type" and isinstance(value, list):
        return "must be a section, not a list; give each entry a name: {NAME: ENTRY}"
    if kind == "float_parsing" and re.fullmatch(r"\d+(\.\d+)?%", value):
        return f"must be a number; write {float(value[:-1]) / 100:g}"
    if kind == "string_type" and isinstance(value, dict):
        return "must be text, but ': ' makes it a section; put it in quotes, also inside --set 'NAME=\"...\"'"
    if kind in ("string_type", "path_type") and isinstance(value, (int, float)):
        return f'must be text; put it in quotes, "{value}"'
    words = _PYDANTIC.get(kind)
    return words.format_map(error.get("ctx", {})) if words else error["msg"]


def _fields(location: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the section at `location`, which may be in a list or mapping. Empty for other values."""
    section: Any = Config
    for key in location:
        if fields := getattr(section, "model_fields", {}):
            section = _without_none(fields[key].annotation) if key in fields else None
        else:  # dict[str, EvalSet] -> EvalSet
            kinds = [kind for kind in get_args(section) if hasattr(kind, "model_fields")]
            section = kinds[0] if kinds else None
    return getattr(section, "model_fields", {})


def _without_none(kind: Any) -> Any:
    """Return X of `X | None`, and any other type unchanged."""
    if isinstance(kind, UnionType):
        return next(part for part in get_args(kind) if part is not NoneType)
    return kind


def _nearest(location: list[str], value: Any) -> str:
    """Suggest the closest valid name in the section, among other trainers' names, or in the whole tree."""
    siblings = {name: ".".join([*location[:-1], name]) for name in _fields(location[:-1])}
    close = difflib.get_close_matches(location[-1], siblings, n=1, cutoff=0.8)
    typo = close and (not isinstance(value, dict) or value.keys() & _fields([*location[:-1], *close]))
    if not typo and "." not in _ALIASES.get(location[-1], "") and (translations := _translations(value)):
        return "; here " + ", ".join(f"{name} is {ours}" for name, ours in translations.items())
    for names, cutoff in ((siblings, 0.85), (_ALIASES, 1.0), (siblings, 0.7), (_NAMES, 0.85)):
        if match := difflib.get_close_matches(location[-1], names, n=1, cutoff=cutoff):
            return f"; did you mean {names[match[0]]}?"
    return f"; valid here: {', '.join(siblings)}" if siblings else ""


def _leaves(location: list[str]) -> dict[str, str]:
    """Map each name below `location` to the settings with that name: {"dtype": "model.dtype or ..."}."""
    leaves: dict[str, str] = {}
    for name in _fields(location):
        entry = {name: ".".join([*location, name])} if location else {}
        for leaf, ours in (entry | _leaves([*location, name])).items():
            leaves[leaf] = f"{leaves[leaf]} or {ours}" if leaf in leaves else ours
    return leaves


def _translations(tree: Any) -> dict[str, str]:
    """Map names in an unknown tree, from other trainers or another section, to our settings."""
    translations: dict[str, str] = {}
    for name, part in tree.items() if isinstance(tree, dict) else ():
        named = "." in _NAMES.get(name, "") and (name in _ALIASES or not isinstance(part, dict))
        translations |= {name: _NAMES[name]} if named else _translations(part)
    return translations


def setting_of(name: str) -> str:
    """Return a setting's full name, given the full name, the last part, or another trainer's name."""
    return name if "." in name else _NAMES.get(name, "section.key").split()[0]


_PYDANTIC = dict(read_words("pydantic_words.txt"))  # kind of error -> sentence
_ROWS = Path(__file__).with_name("other_names.txt").read_text().splitlines()  # TRL, verl, OpenRLHF, slime, NeMo-RL
_ALIASES = {name: ours for ours, _, names in (row.rpartition(": ") for row in _ROWS) for name in names.split()}
_ALIASES |= {name: f"objective.settings.{axis}" for name, axis in OTHER_NAMES.items()}
_NAMES = _leaves([]) | _ALIASES
