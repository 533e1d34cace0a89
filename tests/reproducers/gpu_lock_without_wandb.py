"""Every shipped config must start in an environment of exactly requirements/gpu.lock, trackers included.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/gpu_lock_without_wandb.py
"""

import glob
import importlib.util
import re
import sys
from pathlib import Path

import yaml

from dppo_megatron.config import read_config
from dppo_megatron.report.trackers import missing_packages

lock = {
    m[1].lower().replace("_", "-")
    for m in re.finditer(r"^([A-Za-z0-9_.-]+)==", Path("requirements/gpu.lock").read_text(), re.M)
}
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: (
    None if name in ("wandb", "tensorboard") and name not in lock else real(name, *a)
)
print("in gpu.lock:", {name: name in lock for name in ("tensorboard", "wandb", "matplotlib", "vllm", "megatron-core")})
bad = 0
for path in sorted(glob.glob("examples/*/*.yaml")):
    tree = yaml.safe_load(Path(path).read_text())
    if not (tree.get("tracking") or {}).get("wandb"):
        continue
    for line in missing_packages(read_config(path, []).tracking):
        bad += 1
        print(f"{path}: {line}")
print(f"{bad} of the shipped configs cannot start after containers/install.sh")
sys.exit(bad > 0)
