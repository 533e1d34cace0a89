#!/usr/bin/env bash
# Installs dppo_megatron for GPUs: on a machine, or inside an image (containers/Dockerfile, containers/dppo.def).
set -euo pipefail

usage() {
  cat <<'HELP'
Install dppo_megatron with vLLM for NVIDIA GPUs (CUDA 13) into a virtual environment.

    containers/install.sh [--venv DIR] [--with-te] [--with-sglang] [--validate CONFIG --model DIR] [--dry-run]

  --venv DIR         the environment, created if it does not exist. Default: .venv-gpu in this repository.
                     On a cluster: a directory that every node sees, at the same path.
  --python FILE      a Python 3.12 interpreter. Default: python3.12 or python3 of the PATH.
  --with-te          also build TransformerEngine: `model.layers: transformer_engine` and FP8. Takes 10 to 30 minutes;
                     MAX_JOBS=N sets the number of compilers (about 3 GB of memory each).
  --with-sglang      also install SGLang, into its own environment (for engine.kind: sglang; see engine.python).
  --sglang-venv DIR  that environment. Default: the directory of --venv, followed by -sglang.
  --validate CONFIG  at the end, run `dppo-megatron validate CONFIG`.
  --model DIR        the model directory for --validate (model.path).
  --skip-driver      do not check the driver: in image builds, or with NVIDIA's compatibility package (cuda-compat-13-0).
  --dry-run          check this machine and print the commands; change nothing.
  --help             this text.

Needs Python 3.12 with its headers, gcc, glibc 2.31 (SGLang: 2.34), driver 580 or newer, 20 GB of disk (SGLang: 16 more),
and a package index with the files of PyPI. All versions are pinned in requirements/*.lock. No root rights are needed.
A second run repairs an interrupted one. docs/install.md has the rest.
HELP
}

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$HERE/.venv-gpu PYTHON='' TE='' SGLANG='' SGLANG_VENV='' CONFIG='' MODEL='' DRIVER=yes DRY=''
PROBLEMS=0

say() { echo "install.sh: $*"; }
problem() { say "ERROR: $*" >&2 && PROBLEMS=$((PROBLEMS + 1)); }
die() { say "ERROR: $*" >&2 && exit 1; }
value() { [ $# -ge 2 ] && [ -n "$2" ] || die "$1 needs a value; see --help"; }

# ---- checks: all run, with one line each, before anything is changed -----------------------------------------------

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

check_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3}; do
    if [ "$(python_version "$candidate")" = 3.12 ]; then PYTHON=$(command -v "$candidate"); break; fi
  done
  if [ -z "$PYTHON" ] || [ "$(python_version "$PYTHON")" != 3.12 ]; then
    problem "Python 3.12 is needed (the lock files are for it), and ${PYTHON:-the PATH} has $(python_version "${PYTHON:-python3}" || echo none);" \
      "install it (Ubuntu 24.04: apt-get install python3.12-venv python3.12-dev; RHEL 9: dnf install python3.12-devel;" \
      "without root: conda or uv) and name it with --python"
    PYTHON=python3.12
    return
  fi
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || problem "$PYTHON cannot make environments; apt-get install python3.12-venv"
  "$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))' ||
    problem "$PYTHON has no Python.h, with which Triton compiles launchers; apt-get install python3.12-dev (RHEL: python3.12-devel)"
}

at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; } # at_least VERSION MINIMUM

check_system() {
  local machine libc needed=2.31 reason="vLLM's packages"
  machine=$(uname -m)
  case $machine in
    x86_64) ;;
    aarch64) say "WARNING: $machine: the lock files resolve for it, but were never installed on one" >&2 ;;
    *) problem "$machine: vLLM has packages for x86_64 and aarch64 only; use such a machine" ;;
  esac
  libc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d ' ' -f 2 || true)
  [ -z "$SGLANG" ] || { needed=2.34 && reason="SGLang's packages"; }
  at_least "${libc:-0}" $needed ||
    problem "glibc ${libc:-(none)}: $reason need $needed (Ubuntu 22.04, Debian 12, RHEL 9); use containers/Dockerfile or containers/dppo.def"
  command -v gcc >/dev/null || command -v clang >/dev/null || [ -n "${CC:-}" ] ||
    problem "no C compiler, with which Triton compiles launchers at run time; apt-get install gcc, or load the site's module"
  [ -z "$TE" ] || check_cxx
}

check_cxx() {
  local cxx=${CXX:-g++}
  command -v "$cxx" >/dev/null || { problem "$cxx: no C++ compiler, which TransformerEngine's build needs; apt-get install g++ (11 or newer)"; return; }
  "$cxx" -std=c++20 -fsyntax-only -x c++ - <<<'#include <concepts>' 2>/dev/null ||
    problem "$cxx does not compile C++20, which torch's headers need; install g++ 11 or newer, or set CXX to one"
}

check_driver() {
  local version=''
  if command -v nvidia-smi >/dev/null; then
    version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
  fi
  if ! [[ $version =~ ^[0-9]+\. ]]; then
    say "WARNING: no NVIDIA driver answers here (a login node, an image build?); machines that run this need driver 580 or newer" >&2
  elif [ "${version%%.*}" -lt 580 ]; then
    problem "driver $version: CUDA 13 needs 580 or newer; update it, or install NVIDIA's cuda-compat-13-0" \
      "(data-centre GPUs), put its directory first in LD_LIBRARY_PATH and pass --skip-driver"
  fi
}

free_gb() { # PATH, which may not exist yet: free space of its file system
  local path=$1
  while [ ! -e "$path" ]; do path=$(dirname "$path"); done
  df -Pk "$path" | awk 'NR == 2 { print int($4 / 1048576) }'
}

check_place() { # DIRECTORY GIGABYTES
  local free
  if [ -e "$1" ] && [ -n "$(ls -A "$1")" ]; then
    [ "$(python_version "$1/bin/python" || true)" = 3.12 ] || problem "$1 is not an environment of Python 3.12; remove it or name another directory"
    return # an earlier run created it, so pip downloads only missing packages
  fi
  free=$(free_gb "$1")
  [ "$free" -ge "$2" ] || problem "$1: $free GB free, $2 needed; name a directory on a larger file system"
}

check_temporary() {
  local place=${TMPDIR:-/tmp} free
  free=$(free_gb "$place")
  [ "$free" -ge 6 ] || problem "$place: $free GB free, 6 needed while pip downloads; set TMPDIR to a larger file system"
}

check_files() {
  [ -z "$CONFIG" ] || [ -f "$CONFIG" ] || problem "--validate $CONFIG: no such file"
  [ -z "$MODEL" ] || [ -f "$MODEL/config.json" ] || problem "--model $MODEL: no config.json in it; name a Hugging Face model directory"
  [ -z "$MODEL" ] || [ -n "$CONFIG" ] || problem "--model $MODEL: used by --validate only; pass --validate CONFIG too"
}

# ---- the installation ----------------------------------------------------------------------------------------------

show() { # COMMAND..., quoted for a shell
  local word line=+
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./=:,@%+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
    line+=" $word"
  done
  echo "$line"
}

run() { # REMEDY COMMAND...
  local remedy=$1
  shift
  show "$@"
  [ -n "$DRY" ] || "$@" || die "this command failed (exit status $?): ${*:1:4} ...; $remedy"
}

INDEX="if pip found no package: the index must have the files of PyPI (PIP_INDEX_URL); if the connection broke: run this again"

make_environment() { # DIRECTORY LOCK
  "$1/bin/python" -m pip --version >/dev/null 2>&1 || run "see the message above" "$PYTHON" -m venv "$1"
  # --no-deps, because the lock is complete. Only wheels, because a source build would need a toolkit and other headers.
  run "$INDEX" "$1/bin/python" -m pip install --progress-bar off --no-deps --only-binary :all: --requirement "$2"
}

build_te() {
  local jobs
  jobs=$(awk '/MemAvailable/ { print int($2 / 3145728) }' /proc/meminfo)
  [ "$jobs" -lt "$(nproc)" ] || jobs=$(nproc)
  [ "$jobs" -ge 1 ] || jobs=1
  # The core is a wheel. The part for torch is C++ and compiled against the installed torch; with build isolation pip would
  # fetch a newer one. The headers come from the installed wheels, so no toolkit is needed.
  run "see the compiler's first error above; without TransformerEngine set model.layers: local" \
    env -u CUDA_HOME -u CUDA_PATH NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
    MAX_JOBS="${MAX_JOBS:-$jobs}" PATH="$VENV/bin:$PATH" \
    "$VENV/bin/python" -m pip install --progress-bar off --no-deps --no-build-isolation --requirement "$HERE/requirements/te.lock"
}

verify() { # DIRECTORY PACKAGE...
  local directory=$1
  shift
  run "some installed versions disagree: remove $directory and run this again" "$directory/bin/python" -m pip check
  run "see the line above" "$directory/bin/python" "$HERE/containers/verify.py" "$@"
}

read_options() {
  while [ $# -gt 0 ]; do
    case $1 in
      --venv) value "$@" && VENV=$2 && shift ;;
      --python) value "$@" && PYTHON=$2 && shift ;;
      --with-te) TE=yes ;;
      --with-sglang) SGLANG=yes ;;
      --sglang-venv) value "$@" && SGLANG_VENV=$2 && shift ;;
      --validate) value "$@" && CONFIG=$2 && shift ;;
      --model) value "$@" && MODEL=$2 && shift ;;
      --skip-driver) DRIVER='' ;;
      --dry-run) DRY=yes ;;
      -h | --help) usage && exit 0 ;;
      *) die "$1: no such option; see --help" ;;
    esac
    shift
  done
  VENV=$(realpath -m "$VENV")
  SGLANG_VENV=$(realpath -m "${SGLANG_VENV:-$VENV-sglang}")
}

check_all() {
  check_python
  check_system
  [ -z "$DRIVER" ] || check_driver
  check_place "$VENV" 14
  [ -z "$SGLANG" ] || check_place "$SGLANG_VENV" 16
  check_temporary
  check_files
  if [ "$PROBLEMS" -gt 0 ] && [ -z "$DRY" ]; then die "$PROBLEMS of the checks above failed; nothing was changed"; fi
}

main() { # bash reads the whole file before it calls main, so the file may change meanwhile
  read_options "$@"
  check_all
  make_environment "$VENV" "$HERE/requirements/gpu.lock"
  run "see the message above" "$VENV/bin/python" -m pip install --progress-bar off --no-deps --no-build-isolation --editable "$HERE"
  [ -z "$TE" ] || build_te
  verify "$VENV" dppo_megatron vllm megatron.core
  if [ -n "$SGLANG" ]; then
    make_environment "$SGLANG_VENV" "$HERE/requirements/sglang-gpu.lock"
    verify "$SGLANG_VENV" sglang
  fi
  [ -z "$CONFIG" ] ||
    run "the lines above name the settings" "$VENV/bin/dppo-megatron" validate "$CONFIG" ${MODEL:+--set "model.path=$MODEL"}

  [ -z "$DRY" ] || { [ "$PROBLEMS" = 0 ] || die "$PROBLEMS of the checks above failed"; exit 0; }
  say "done. Next: source $VENV/bin/activate && dppo-megatron --help"
  [ -z "$SGLANG" ] || say "for engine.kind: sglang set engine.python: $SGLANG_VENV/bin/python"
}

main "$@"; exit
