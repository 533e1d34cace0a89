"""benchmarks/gpu_day.py on the null device: the script itself, with its parts on tiny shapes. Arguments are its own.

Its numbers mean nothing, and the name of the device, which its result file carries, says so.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tests.null_gpu.with_te  # noqa: F401
from tests.null_gpu import scenario

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


def main() -> int:
    """Run gpu_day with this module in the place of gpu_parts.py; or, asked for a part, that."""
    if "--work" in sys.argv:
        return _part()
    import gpu_day

    mine = ("-m", "tests.null_gpu.gpu_day")
    gpu_day.PARTS = tuple(
        replace(part, command=mine + part.command[1:])
        for part in gpu_day.PARTS
        if part.command[0] == "benchmarks/gpu_parts.py"
    )
    return gpu_day.main()


def _part() -> int:
    import gpu_parts

    import dppo_megatron.actor

    begin = dppo_megatron.actor.init_layout

    def over_gloo(config: Any) -> Any:
        scenario.start_group(rank=0, size=1)
        return begin(config)

    dppo_megatron.actor.init_layout = over_gloo
    gpu_parts.SIZES["cuda"] = gpu_parts.SIZES["cpu"]
    with scenario.device():
        gpu_parts.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
