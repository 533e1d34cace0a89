"""Rules of a cluster's devices: there are enough, and an engine has all of its own on its nodes."""

from __future__ import annotations

from dppo_megatron.config import Config


def problems(config: Config, nodes: int, per_node: int) -> list[str]:
    """Why `nodes` of `per_node` devices are too few for ranks and engines, or no place for an engine."""
    engine, serving, needed = config.engine, config.engine_devices, devices_needed(config)
    if serving and engine.devices_per_node > per_node:
        return [
            f"engine.nodes = {engine.nodes}: an engine has {engine.devices_per_node} devices on each of its nodes, and "
            f"a node has {per_node}; set it to {-(-engine.devices // per_node)}"
        ]
    if needed > nodes * per_node:
        engines = f" and {engine.count} engines of {engine.devices}" if serving else ""
        shared = ", which share devices," if serving and engine.placement == "colocated" else ""
        return [
            f"parallel.world_size = {config.parallel.world_size}: trainer ranks{engines}{shared} need {needed} "
            f"devices, {nodes} x {per_node} are {nodes * per_node}; lower one of them or add nodes"
        ]
    if serving and (slots := _slots(config, nodes, per_node)) < engine.count:
        return [
            f"engine.count = {engine.count}: {nodes} x {per_node} devices, with trainer ranks on "
            f"{config.parallel.world_size}, hold {slots} engines of {engine.devices_per_node} devices on "
            f"{engine.nodes} nodes each; lower it or engine.tensor_parallel"
        ]
    return []


def devices_needed(config: Config) -> int:
    """Devices of trainer ranks and of the engines that the run starts; colocated engines use the ranks'."""
    if config.engine.placement == "colocated":
        return max(config.parallel.world_size, config.engine_devices)
    return config.parallel.world_size + config.engine_devices


def _slots(config: Config, nodes: int, per_node: int) -> int:
    """Engines that find their devices: beside the ranks, which fill node after node, or under them. Those of several
    nodes take whole nodes that the ranks leave."""
    full, begun = divmod(config.parallel.world_size, per_node)
    if config.engine.placement == "colocated":
        full = begun = 0
    each, span = config.engine.devices_per_node, config.engine.nodes
    free = (nodes - full - bool(begun)) // span
    return free * (per_node // each) + (bool(begun) and span == 1) * ((per_node - begun) // each)
