"""Run `dppo-megatron certify` for engines, precisions, models and layouts; print a line and the differing operators.

    python benchmarks/certify_table.py --engine vllm --dtype fp32 --model quickstart
    python benchmarks/certify_table.py                       every cell, twelve minutes on two cores
    python benchmarks/certify_table.py --exact               the dense cells with engine.exact

The dense model is the quickstart's start policy (`make quickstart` makes it), the mixture a random Qwen3-MoE of 4
layers with 2 of 8 experts active and replayed routes. One engine serves both layouts of a cell. With --exact each
layout has its own engine, because the engine then computes in the trainer's layout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from dppo_megatron.config import Config, read_config
from dppo_megatron.lab.certify.certificate_text import sampled
from dppo_megatron.lab.certify.command import certify
from dppo_megatron.run.launch.own_engines import running_engines
from tests.support.engines import make_model

CONFIG = Path("examples/quickstart/config.yaml")
ENGINES, DTYPES, MODELS, TENSOR = ("vllm", "sglang"), ("fp32", "bf16"), ("quickstart", "moe"), (1, 2)


def cell_config(root: Path, engine: str, dtype: str, model: str, tensor: int, exact: bool) -> Config:
    settings: dict[str, Any] = {
        "run.dir": root / f"{engine}-{dtype}-{model}",
        "data.eval": "null",
        "eval.every": 0,
        "engine.kind": engine,
        "engine.dtype": dtype,
        "engine.exact": str(exact).lower(),
        "engine.max_num_seqs": 16,
        "model.dtype": dtype,
        "weight_sync.probe_tolerance": 1,
        "parallel.world_size": tensor,
        "parallel.tensor": tensor,
    }
    if model == "moe":
        settings |= {
            "model.path": root / "moe",
            "data.train": root / "prompts.jsonl",
            "data.max_prompt_tokens": 64,
            "engine.max_model_len": 256,
            "rollout.max_response_tokens": 48,
            "rollout.routing_replay": "true",
            "parallel.sequence": "true" if tensor > 1 else "false",
        }
    return read_config(CONFIG, [f"{name}={value}" for name, value in settings.items()])


def row(name: str, certificate: dict[str, Any]) -> str:
    table = sampled(certificate)
    line = f"{name:28}{table['tokens']:7}{table['same_bits']:8.1%}{table['kl']:10.1e}{table['largest']:10.1e}"
    operators = certificate["operators"]
    if isinstance(operators, str):
        return f"{line}  {operators}"
    largest: dict[str, float] = {}
    for entry in operators["own"]:
        if entry["differing"]:
            largest[entry["operator"]] = max(largest.get(entry["operator"], 0.0), entry["roundings"])
    own = ", ".join(f"{operator} {roundings:.1f}" for operator, roundings in largest.items())
    return f"{line}  {certificate['first']}; by themselves: {own or 'none'}"


def measure(root: Path, engine: str, dtype: str, model: str, exact: bool) -> None:
    for served in [(tensor,) for tensor in TENSOR] if exact else [TENSOR]:
        with running_engines(cell_config(root, engine, dtype, model, served[0], exact)) as urls:
            for tensor in served:
                config = cell_config(root, engine, dtype, model, tensor, exact)
                found = certify(config, str(CONFIG), prompts=16, urls=urls)[1]
                print(row(f"{engine} {dtype} {model} TP {tensor}", found), flush=True)


def main(engines: Sequence[str], dtypes: Sequence[str], models: Sequence[str], exact: bool) -> None:
    print(f"# {platform.processor() or platform.machine()}; {platform.platform()}")
    print(f"{'cell':28} tokens   0 ULP   KL (k3)   largest  first to differ; roundings of each operator")
    with tempfile.TemporaryDirectory(prefix="certify-") as directory:
        root = Path(directory)
        make_model(root / "moe", 1, experts=8)
        rows = (json.dumps({"prompt": f"12+{n}=", "answer": "1"}) for n in range(16))
        (root / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        for cell in itertools.product(engines, dtypes, models):
            measure(root, *cell, exact)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--dtype", action="append", choices=(*DTYPES, "fp16"), help="default: fp32 and bf16")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--exact", action="store_true", help="with engine.exact")
    chosen = parser.parse_args()
    models = chosen.model or (("quickstart",) if chosen.exact else MODELS)
    main(chosen.engine or ENGINES, chosen.dtype or DTYPES, models, chosen.exact)
