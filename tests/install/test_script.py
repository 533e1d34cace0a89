"""containers/install.sh: its checks, its commands and its messages, with programs that record instead of install."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "containers" / "install.sh"
# A Python 3.12: names its version, makes environments that contain it, and otherwise records its arguments.
PYTHON = """#!/bin/bash
case "$*" in
  *'print("%d.%d"'*) echo {version}; exit ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/dppo-megatron" ;;
  "-m pip --version") exit 0 ;;
esac
echo "$(basename "$(dirname "$(dirname "$0")")")/$(basename "$0") $*" >> "$RECORD"
[ -z "${{FAIL:-}}" ] || [[ "$*" != *$FAIL* ]] || exit 3
"""
GOOD = {
    "python3.12": PYTHON.format(version="3.12"),
    "getconf": "#!/bin/sh\necho glibc 2.36\n",
    "nvidia-smi": "#!/bin/sh\necho 580.95.05\n",
    "df": "#!/bin/sh\necho header\necho disk 900000000 1 800000000 1% /\n",
    "uname": "#!/bin/sh\necho x86_64\n",
    "gcc": "#!/bin/sh\n",
    "g++": "#!/bin/sh\n",
}


@dataclass(frozen=True)
class Done:
    returncode: int
    output: str
    commands: list[str]  # command lines of the recording programs, in order


@pytest.fixture
def install(tmp_path) -> Callable[..., Done]:
    def run(*arguments: str, fail: str = "", **programs: str | None) -> Done:
        stubs, record = tmp_path / "stubs", tmp_path / "record"
        stubs.mkdir(exist_ok=True)
        for name, text in {**GOOD, **{name.replace("_", "-"): text for name, text in programs.items()}}.items():
            if text is not None:
                (stubs / name).write_text(text)
                (stubs / name).chmod(0o755)
        environment = {"PATH": f"{stubs}:/usr/bin:/bin", "RECORD": str(record), "FAIL": fail, "TMPDIR": str(tmp_path)}
        command = ["bash", str(SCRIPT), "--venv", str(tmp_path / "env"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=tmp_path)
        commands = record.read_text().splitlines() if record.exists() else []
        return Done(
            done.returncode, done.stdout + done.stderr, [c for c in commands if " -c import ensurepip" not in c]
        )

    return run


def errors(done: Done) -> list[str]:
    return [line for line in done.output.splitlines() if "ERROR" in line]


def positions(done: Done, *wanted: str) -> list[int]:
    """Return the first position of each text in the sequence of commands."""
    return [next(i for i, command in enumerate(done.commands) if text in command) for text in wanted]


def test_the_lock_then_the_package_then_the_checks(install):
    done = install()
    assert done.returncode == 0, done.output
    order = ["-m venv", "gpu.lock", "--editable", "pip check", "verify.py dppo_megatron vllm megatron.core"]
    assert positions(done, *order) == sorted(positions(done, *order))
    for command in done.commands:
        assert "pip install" not in command or "--no-deps" in command
        assert "te.lock" not in command
        assert "sglang" not in command
        assert "validate" not in command


def test_everything(install, tmp_path):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    done = install("--with-te", "--with-sglang", "--validate", "config.yaml", "--model", "model")
    assert done.returncode == 0, done.output
    order = [
        "gpu.lock",
        "--no-build-isolation --requirement",
        "env-sglang/python -m pip install",
        "verify.py sglang",
        "validate config.yaml --set model.path=model",
    ]
    assert positions(done, *order) == sorted(positions(done, *order))
    (te,) = (command for command in done.commands if "te.lock" in command)
    assert "--only-binary" not in te
    assert f"engine.python: {tmp_path}/env-sglang/bin/python" in done.output


def test_a_dry_run_prints_the_commands_and_changes_nothing(install, tmp_path):
    done = install("--dry-run", "--with-te")
    assert done.returncode == 0
    assert not (tmp_path / "env").exists()
    assert all(" -c " in command for command in done.commands)  # it asked Python, and ran nothing else
    for text in ("gpu.lock", "te.lock", "NVTE_BUILD_USE_NVIDIA_WHEELS=1", "pip check"):
        assert any(line.startswith("+ ") and text in line for line in done.output.splitlines()), text


@pytest.mark.parametrize(
    ("arguments", "programs", "says"),
    [
        ([], {"nvidia_smi": "#!/bin/sh\necho 570.86.15\n"}, "driver 570.86.15: CUDA 13 needs 580 or newer"),
        ([], {"getconf": "#!/bin/sh\necho glibc 2.28\n"}, "glibc 2.28: vLLM's packages need 2.31"),
        (["--with-sglang"], {"getconf": "#!/bin/sh\necho glibc 2.31\n"}, "glibc 2.31: SGLang's packages need 2.34"),
        ([], {"getconf": "#!/bin/sh\nexit 1\n"}, r"glibc \(none\)"),
        ([], {"uname": "#!/bin/sh\necho ppc64le\n"}, "ppc64le: vLLM has packages for"),
        ([], {"df": "#!/bin/sh\necho header\necho disk 9 1 9000000 1% /\n"}, "env: 8 GB free, 14 needed"),
        (["--python", "python3.12"], {"python3.12": PYTHON.format(version="3.10")}, "python3.12 has 3.10;.*--python"),
        (["--with-te"], {"g++": "#!/bin/sh\nexit 1\n"}, r"g\+\+ does not compile C\+\+20"),
        (["--validate", "none.yaml"], {}, "--validate none.yaml: no such file"),
    ],
)
def test_a_machine_that_does_not_fit_is_refused_in_one_line_before_anything_changes(
    install, tmp_path, arguments, programs, says
):
    done = install(*arguments, **programs)
    assert done.returncode == 1
    assert len(errors(done)) == 2, done.output  # the reason, and that the checks failed
    assert re.search(says, errors(done)[0]), done.output
    assert ";" in errors(done)[0] or "no such file" in errors(done)[0]  # a remedy
    assert not (tmp_path / "env").exists()


def test_all_reasons_are_given_at_once(install):
    done = install("--with-sglang", nvidia_smi="#!/bin/sh\necho 550.54\n", getconf="#!/bin/sh\necho glibc 2.28\n")
    assert "2 of the checks above failed" in errors(done)[-1]


def test_a_directory_that_is_no_environment_is_refused(install, tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "thesis.tex").touch()
    done = install()
    assert done.returncode == 1
    assert "is not an environment of Python 3.12" in errors(done)[0]


def test_no_driver_is_a_warning_and_an_old_one_can_be_allowed(install):
    old = "#!/bin/sh\necho 570.86.15\n"
    assert install("--skip-driver", nvidia_smi=old).returncode == 0
    done = install(nvidia_smi="#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    assert done.returncode == 0
    assert "WARNING: no NVIDIA driver answers here" in done.output


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        ("gpu.lock", "PIP_INDEX_URL"),
        ("te.lock", "model.layers: local"),
        ("verify.py", "see the line above"),
        ("pip check", "run this again"),
    ],
)
def test_a_step_that_fails_ends_it_with_the_remedy(install, fail, says):
    done = install("--with-te", fail=fail)
    assert done.returncode == 1
    assert re.search(r"failed \(exit status 3\): (\S+/env/bin/python|env -u)", errors(done)[0])
    assert says in errors(done)[0]
    assert fail in done.commands[-1]  # nothing ran after it


@pytest.mark.parametrize(
    ("build", "says"), [("2.13.0+cpu", "not the build for CUDA 13"), ("2.13.0", "import gone: ModuleNot")]
)
def test_the_last_check_names_a_wrong_torch_and_a_missing_module(tmp_path, build, says):
    cuda = None if "cpu" in build else "13.0"
    (tmp_path / "torch.py").write_text(f"__version__ = {build!r}\nclass version:\n    cuda = {cuda!r}\n")
    command = [sys.executable, SCRIPT.parent / "verify.py", "json", "gone"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("ERROR: ")
    assert says in done.stderr


def test_a_second_run_uses_the_environment_of_the_first(install):
    install(fail="gpu.lock")
    done = install()
    assert done.returncode == 0
    assert len([command for command in done.commands if "-m venv" in command]) == 1


def test_the_help_names_every_option():
    text = subprocess.run(["bash", SCRIPT, "--help"], capture_output=True, text=True, timeout=900, check=True).stdout
    source = SCRIPT.read_text()
    options = re.findall(r"^ +(?:-h \| )?(--[a-z-]+)\)", source, re.MULTILINE)
    assert len(options) >= 9
    assert all(re.search(rf"^  {option}\b", text, re.MULTILINE) for option in options)
    done = subprocess.run(["bash", SCRIPT, "--nope"], capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (1, "install.sh: ERROR: --nope: no such option; see --help\n")


@pytest.mark.parametrize("recipe", ["Dockerfile", "dppo.def"])
def test_the_recipes_run_the_script_and_name_the_same_base(recipe):
    text = (SCRIPT.parent / recipe).read_text()
    assert "/opt/dppo_megatron/containers/install.sh --venv /opt/dppo --skip-driver" in text
    assert "nvidia/cuda:13.0.2-devel-ubuntu24.04" in text
    assert "pip install" not in text


def test_the_files_that_the_apptainer_recipe_copies_exist():
    (files,) = re.findall(r"^%files\n(.*?)\n\n", (SCRIPT.parent / "dppo.def").read_text(), re.MULTILINE | re.DOTALL)
    sources = [line.split()[0] for line in files.splitlines()]
    assert len(sources) >= 7
    assert all((ROOT / source).exists() for source in sources)
