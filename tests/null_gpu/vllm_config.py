"""Makes vLLM's whole configuration of the server commands that this project writes for device cuda, as on H100s.

    python -m tests.null_gpu.vllm_config DIRECTORY EXAMPLE...     on the null device; writes DIRECTORY/found.json

An EXAMPLE may be followed by overrides: "examples/qwen3_8b/config.yaml engine.tensor_parallel=2".

Also says which private names of vLLM, of those that our extension uses on GPUs, are absent or take other arguments.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "dppo_megatron/rollout/engines/vllm/extension"


def main() -> None:
    directory, examples = Path(sys.argv[1]), sys.argv[2:]
    _be_an_h100()
    found = {"absent": absent(), "examples": {}}
    for example in examples:
        try:
            found["examples"][example] = configuration(example, directory)
        except (Exception, SystemExit) as error:  # argparse exits
            found["examples"][example] = {"error": f"{type(error).__name__}: {error}"}
    (directory / "found.json").write_text(json.dumps(found))


def _be_an_h100() -> None:
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    NonNvmlCudaPlatform.is_fully_connected = classmethod(lambda cls, ids: True)
    platforms._current_platform = platforms.current_platform = NonNvmlCudaPlatform()


def configuration(example: str, directory: Path) -> dict[str, Any]:
    """Return vLLM's configuration for the command of `example`, with DIRECTORY/model if its own model does not exist.
    If an engine spans several nodes, the command is that of the last node."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dppo_megatron.rollout.engines.kinds import KINDS
    from dppo_megatron.rollout.engines.serving import Node
    from dppo_megatron.rollout.engines.vllm.extension import routes
    from dppo_megatron.rollout.engines.vllm.extension.experts import ExpertsReader
    from dppo_megatron.rollout.engines.vllm.extension.sampling_masks import MaskReader
    from dppo_megatron.run.checks import load_config

    path, *overrides = example.split()
    config = load_config(path, overrides)
    model = config.model.path if (config.model.path / "config.json").exists() else directory / "model"
    nodes = config.engine.nodes
    node = Node(nodes - 1, "127.0.0.1", 8001) if nodes > 1 else None
    command = KINDS["vllm"].command(config, 8000, model, 0, node, device="cuda")
    os.environ.update(KINDS["vllm"].environment(config, 0, device="cuda"))
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])
    validate_parsed_serve_args(arguments)
    made = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    return {
        "v2": made.use_v2_model_runner,
        "async": made.scheduler_config.async_scheduling,
        "graphs": str(made.compilation_config.cudagraph_mode),
        "worker": made.parallel_config.worker_cls,
        "extension": made.parallel_config.worker_extension_cls,
        "tensor_parallel": made.parallel_config.tensor_parallel_size,
        "pipeline_parallel": made.parallel_config.pipeline_parallel_size,
        "expert_parallel": made.parallel_config.enable_expert_parallel,
        "nodes": made.parallel_config.nnodes,
        "on_this_node": made.parallel_config.local_world_size,
        "executor": made.parallel_config.distributed_executor_backend,
        "sleep": made.model_config.enable_sleep_mode,
        "logprobs_mode": str(made.model_config.logprobs_mode),
        "transfer": made.weight_transfer_config.backend,
        "problems": routes._unfit_settings(made),
        "experts": ExpertsReader(None, made).available,
        "sampling_masks": MaskReader(None, made).available,
        "wanted": {
            "tensor_parallel": config.engine.tensor_parallel,
            "pipeline_parallel": config.engine.pipeline_parallel,
            "expert_parallel": config.engine.expert_parallel,
            "nodes": nodes,
            "on_this_node": config.engine.devices_per_node,
            "sleep": config.engine.placement == "colocated",
            "experts": config.rollout.routing_replay,
            "sampling_masks": bool(config.rollout.has_sampling_mask),
        },
    }


def absent() -> list[str]:
    """Return the names that the extension uses and this vLLM lacks or calls by other arguments."""
    from tests.support.internals import names_of

    for module in sorted(EXTENSION.glob("*.py")):
        import_module(f"dppo_megatron.rollout.engines.vllm.extension.{module.stem}")
    return [entry.path for entry in names_of("vllm")[1] if entry.problem()]


if __name__ == "__main__":
    main()
