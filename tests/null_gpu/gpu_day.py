"""benchmarks/gpu_day.py on the null device: the script itself, with its parts on tiny shapes. Arguments are its own.

Its times mean nothing, and the name of the device, which its result file carries, says so. Left out are parts that need
NCCL between processes, a server, or the time of a kernel.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import tests.null_gpu.with_te  # noqa: E402, F401
from tests.null_gpu import scenario  # noqa: E402

SCRIPTS = ("benchmarks/gpu_parts.py", "benchmarks/gpu_ranks.py")


def main() -> int:
    """Run gpu_day with this file in the place of its parts' scripts; or, asked for a part or a rank of one, that."""
    if "--work" in sys.argv:
        return _part()
    import gpu_day

    gpu_day.PARTS = tuple(
        replace(part, command=(str(Path(__file__)), *part.command[1:]))
        for part in gpu_day.PARTS
        if part.command[0] in SCRIPTS
    )
    return gpu_day.main()


def _part() -> int:
    import gpu_case
    import gpu_parts
    import gpu_ranks

    import dppo_megatron.train.actor

    begin = dppo_megatron.train.actor.init_layout

    def over_gloo(config: Any) -> Any:
        scenario.start_group(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        return begin(config)

    dppo_megatron.train.actor.init_layout = over_gloo
    gpu_ranks.__file__ = __file__  # which starts its ranks
    gpu_parts.FP8 = ()  # the stand-ins for TransformerEngine have none
    for sizes in (gpu_case.SIZES, gpu_case.MOE_SIZE):
        sizes["cuda"] = sizes["cpu"]
    with scenario.device():
        return (gpu_ranks if sys.argv[1] in gpu_ranks.CASES else gpu_parts).main() or 0


if __name__ == "__main__":
    sys.exit(main())
