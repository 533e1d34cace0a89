"""Makes single nodes of the lab faulty. See faulty_node.sh."""

import sys
from pathlib import Path

from tests.support.slurm.runs import ROOT, Run

SUPPORT = ROOT / "tests" / "support" / "slurm"
FAULTY_NODE = SUPPORT / "faulty_node.sh"


def fault_environment(run: Run, task: Path, fault: str, nodes: str) -> dict[str, str]:
    """Return the variables that faulty_node.sh reads: the fault, the faulty nodes, and paths."""
    paths = {"RUN": run.directory, "MODEL": task / "random_model", "GPUS": SUPPORT / "gpus", "PYTHON": sys.executable}
    return {"FAULT": fault, "FAULT_NODES": nodes} | {name: str(path) for name, path in paths.items()}
