"""docs/adding.md lists every rule file, and all have the same shape."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

from dppo_megatron import checks

PAGE = (Path(__file__).parents[3] / "docs/adding.md").read_text()
RULES = {module.name for module in pkgutil.iter_modules(checks.__path__)}


def test_every_rule_file_has_rules_of_the_config():
    for name in RULES:
        module = importlib.import_module(f"dppo_megatron.run.checks.{name}")
        rules = [rule for rule in vars(module) if re.fullmatch(r"([a-z]+_)?problems", rule)]
        assert rules, name
        for rule in rules:
            signature = inspect.signature(getattr(module, rule))
            assert next(iter(signature.parameters)) == "config", f"{name}.{rule}"
            assert signature.return_annotation in ("list[str]", "Iterator[str]"), f"{name}.{rule}"


def test_the_page_names_every_rule_file():
    settings = {rule.__name__.rpartition(".")[2] for rule in checks.SETTINGS}
    first_cells = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    assert settings | set(re.findall(r"`(\w+)`", "".join(first_cells))) == RULES
