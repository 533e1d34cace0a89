"""Makes a config for two trainer nodes and an engine node, without a model or data."""

from dppo_megatron.config import Config
from tests.support.configs import make_config


def config(*, world_size=16, engines=4, tensor_parallel=2, sections=None, **slurm) -> Config:
    """Return the config, updated by `sections`."""
    tree = {
        "run": {"dir": "run"},
        "model": {"path": "model"},
        "parallel": {"world_size": world_size},
        "engine": {"count": engines, "tensor_parallel": tensor_parallel},
        "slurm": {"trainer_nodes": 2, "engine_nodes": 1, **slurm},
    }
    for name, values in (sections or {}).items():
        tree[name] = tree.get(name, {}) | values
    return make_config(**tree)
