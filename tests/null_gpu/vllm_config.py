"""Makes vLLM's whole configuration of the server commands that this project writes for device cuda, as on H100s.

    python -m tests.null_gpu.vllm_config DIRECTORY EXAMPLE...     on the null device; writes DIRECTORY/found.json

An EXAMPLE may be followed by overrides: "examples/qwen3_8b/config.yaml engine.tensor_parallel=2".

Also says which private names of vLLM, of those that our extension uses on GPUs, are absent or take other arguments.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
# What the extension calls by which arguments, where it is not checked at run time (`fan_out.INTERNALS` is).
CALLED: dict[str, tuple[str | int, ...]] = {
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": ("self", "mode", "clear_cache"),
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation": ("self",),
    "vllm.v1.engine.async_llm:AsyncLLM.sleep": ("self", "level", "mode"),
    "vllm.v1.engine.async_llm:AsyncLLM.wake_up": ("self",),
    "vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache": ("self", "reset_running_requests"),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("self", "method", "args"),
    "vllm.v1.engine.async_llm:AsyncLLM.get_weight_version": ("self",),
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version": ("self", 0),  # 0: one by position
    "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs": ("self", "logprobs_lists"),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.__init__": ("self", 0, 0, 0, 0),
    "vllm.v1.worker.gpu_worker:Worker.init_weight_transfer_engine": ("self", 0),
    "vllm.v1.worker.gpu_worker:Worker.start_weight_update": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.update_weights": ("self", 0),
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update": ("self",),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": (0, 0),
    "vllm.model_executor.model_loader.base_loader:process_weights_after_loading": (0, 0, 0),
}
# Attributes, of which instances may have some only: then the source of their class must name them.
SET: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu_worker:Worker": ("_weight_update_active", "weight_transfer_engine", "model_runner"),
    "vllm.model_executor.layers.fused_moe.layer:MoERunner": ("layer_id",),
    "vllm.v1.engine.output_processor:RequestState": ("logprobs_processor",),
    "vllm.v1.outputs:LogprobsLists": ("logprob_token_ids", "logprobs"),
    "vllm.logprobs:FlatLogprobs": ("token_ids", "logprobs"),
    "vllm.v1.engine.logprobs:LogprobsProcessor": ("logprobs",),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": ("model", "lora_manager"),
}
EXTENSION = ROOT / "dppo_megatron/engines/vllm/extension"


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
    """What vLLM makes of the command for `example`, with DIRECTORY/model where its own is not made yet; of the command
    for its last node, where an engine spans several."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dppo_megatron.checks import load_config
    from dppo_megatron.engines.serving import Node
    from dppo_megatron.engines.vllm.extension import routes
    from dppo_megatron.engines.vllm.extension.experts import ExpertsReader
    from dppo_megatron.engines.vllm.extension.sampling_masks import MaskReader
    from dppo_megatron.engines.vllm.server import vllm_command, vllm_environment

    path, *overrides = example.split()
    config = load_config(path, overrides)
    model = config.model.path if (config.model.path / "config.json").exists() else directory / "model"
    nodes = config.engine.nodes
    node = Node(nodes - 1, "127.0.0.1", 8001) if nodes > 1 else None
    command = vllm_command(config, 8000, model, 0, node, device="cuda")
    os.environ.update(vllm_environment(config, 0, device="cuda"))
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
    """Of the names that the extension uses on GPUs, those that this vLLM lacks or calls by other arguments."""
    for module in sorted(EXTENSION.glob("*.py")):
        import_module(f"dppo_megatron.engines.vllm.extension.{module.stem}")
    lacking = [path for path, arguments in CALLED.items() if not _takes(path, arguments)]
    for path, names in SET.items():
        cls = _find(path)
        sources = "".join(inspect.getsource(c) for c in getattr(cls, "__mro__", ()) if c.__module__.startswith("vllm"))
        lacking += [
            f"{path}.{name}"
            for name in names
            if not hasattr(cls, name) and f"self.{name}" not in sources and f" {name}:" not in sources
        ]
    return lacking + [f"AsyncLLM.{path}" for path in _fan_out()]


def _fan_out() -> list[str]:
    """As the server asks when it starts, of an engine without its processes."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    from dppo_megatron.engines.vllm.extension.fan_out import missing

    engine = AsyncLLM.__new__(AsyncLLM)
    engine.output_handler = None
    engine.input_processor = InputProcessor.__new__(InputProcessor)
    engine.output_processor = OutputProcessor(None, log_stats=False)
    engine.engine_core = AsyncMPClient.__new__(AsyncMPClient)
    engine.engine_core.resources = SimpleNamespace(engine_dead=False)
    return missing(engine)


def _find(path: str) -> Any:
    module, _, names = path.partition(":")
    try:
        found = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found


def _takes(path: str, arguments: tuple[str | int, ...]) -> bool:
    function = _find(path)
    if function is None:
        return False
    positional = [0 for name in arguments if name == 0]
    named = {name: None for name in arguments if name not in (0, "self")}
    own = [None] if arguments[:1] == ("self",) else []
    try:
        inspect.signature(function).bind(*own, *positional, **named)
    except TypeError:
        return False
    return True


if __name__ == "__main__":
    main()
