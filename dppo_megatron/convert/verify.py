"""Compares the logits of a Hugging Face directory and a Megatron checkpoint, and finds the first layer that differs.

One process builds both models in fp32 and needs memory for them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dppo_megatron.config import Config
from dppo_megatron.hf import HFModelConfig, ModelError, SafetensorsDirectory, WeightSource, fp8, read_hf_config
from dppo_megatron.hf.load import load_into
from dppo_megatron.hf.weight_source import open_weights

from .job import ConversionWorker, convert
from .to_hf import ToHF

TOLERANCE = 1e-4  # share of the largest magnitude, far above fp32 rounding and far below a misplaced weight's effect
_TOKENS = 64
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Describes how two models' outputs differ on the same tokens."""

    logits: float  # largest absolute difference
    scale: float  # largest absolute logit
    differs_at: str | None  # "embedding", "layer 3", "final norm", "logits": the first that differs; None = none

    def __str__(self) -> str:
        numbers = f"largest logit difference {self.logits:.2g}, largest logit {self.scale:.3g}"
        if self.differs_at is None:
            return f"verify: pass ({numbers})"
        return f"verify: FAIL, the first output that differs is that of: {self.differs_at} ({numbers})"


def verify(hf_dir: Path, checkpoint: Path) -> Comparison:
    """Compare transformers' model in `hf_dir` with the trainer's Megatron model in `checkpoint` on random tokens.

    If one side stores a weight in fewer bits (bf16, FP8), the other side is rounded in the same way, so that the result
    shows the conversion and not the rounding. Raises `ModelError` for a model that the trainer cannot build here.
    """
    config = read_hf_config(hf_dir)
    count = min(_TOKENS, config.max_position_embeddings)
    ids = torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    with _full_precision(hf_dir, config) as readable:
        expected = outputs_of_transformers(readable, ids, open_weights(checkpoint, config))
        actual = outputs_of_megatron(readable, ids, checkpoint, SafetensorsDirectory(hf_dir))
    return compare(expected, actual)


def compare(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> Comparison:
    """Compare outputs [T, ...] by name, in the order of computation, "logits" last."""
    differs_at = None
    for name, right in expected.items():
        left = actual[name][: len(right)]
        limit = TOLERANCE * max(1.0, right.abs().max().item())
        if not (left - right[: len(left)]).abs().max().item() <= limit:  # also when it is NaN
            differs_at = name
            break
    logits = expected["logits"]
    rows = min(len(logits), len(actual["logits"]))
    difference = (actual["logits"][:rows] - logits[:rows]).abs().max().item()
    return Comparison(difference, logits.abs().max().item(), differs_at)


@torch.no_grad()
def outputs_of_transformers(hf_dir: Path, ids: Tensor, rounded_as: WeightSource) -> dict[str, Tensor]:
    """Return each model part's output for `hf_dir`, with weights rounded as in `rounded_as`."""
    import transformers

    kind = getattr(transformers, read_hf_config(hf_dir).architecture)
    config = kind.config_class.from_pretrained(hf_dir)
    config.model_type = kind.config_class.model_type  # transformers does not know Kimi K2's, and would load no experts
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "local_files_only": True}
    model: Any = kind.from_pretrained(hf_dir, attn_implementation="eager", **options).eval()
    narrow = {info.dtype for info in rounded_as.tensors.values()} & {torch.bfloat16, torch.float16}
    for parameter in model.parameters():
        for dtype in narrow:
            parameter.copy_(parameter.to(dtype))
    parts = {"embedding": model.model.embed_tokens}
    parts |= {f"layer {i}": layer for i, layer in enumerate(model.model.layers)}
    parts |= {"final norm": model.model.norm, "logits": model.lm_head}
    with record_outputs(parts) as outputs:
        model(ids[None])
    return {name: output[0] for name, output in outputs.items()}


def outputs_of_megatron(
    hf_dir: Path, ids: Tensor, checkpoint: Path, rounded_as: SafetensorsDirectory
) -> dict[str, Tensor]:
    """Return each part's output in the trainer's model from `checkpoint`, with weights rounded as in `rounded_as`."""
    from dppo_megatron.hf.megatron_model import unwrap
    from dppo_megatron.train.actor import Actor, check_model, init_layout

    config = trainer_config(hf_dir)
    if problems := check_model(config):
        raise ModelError(f"verify {hf_dir}", problems)
    with _without_rank_variables():
        layout = init_layout(config)
    try:
        actor = Actor(config, layout)
        source = _RoundedWeights(open_weights(checkpoint, actor.hf), rounded_as)
        load_into(actor.model_chunks, checkpoint, actor.hf, source=source)
        model: Any = unwrap(actor.model_chunks[0])
        parts = {"embedding": model.embedding}
        parts |= {f"layer {i}": layer for i, layer in enumerate(model.decoder.layers)}
        parts |= {"final norm": model.decoder.final_layernorm, "logits": model.output_layer}
        with record_outputs(parts) as outputs:
            actor.score(ids.numpy())
        outputs["logits"] = outputs["logits"][..., : actor.hf.vocab_size]  # the model's vocabulary is padded
        return {name: output.reshape(-1, output.shape[-1]) for name, output in outputs.items()}
    finally:
        layout.close()


@contextlib.contextmanager
def record_outputs(parts: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that collects each module's last output by name. From a tuple it keeps the first value."""
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[name] = (output[0] if isinstance(output, tuple) else output).detach().float().cpu()

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in parts.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _full_precision(hf_dir: Path, config: HFModelConfig) -> Iterator[Path]:
    """Yield `hf_dir`, or a dequantized copy of quantized weights, for which transformers needs further packages."""
    if config.quantization is None:
        yield hf_dir
        return
    with tempfile.TemporaryDirectory(dir=hf_dir.parent, prefix=".verify-") as directory:
        copy = Path(directory) / hf_dir.name
        convert(partial(ToHF, hf_dir, copy, hf_dir, torch.float32), worker=ConversionWorker())
        yield copy


class _RoundedWeights:
    """Rounds the weights of `source` to the dtypes of `stored`; a `WeightSource`."""

    def __init__(self, source: WeightSource, stored: SafetensorsDirectory):
        self._source, self._stored, self.tensors = source, stored.tensors, source.tensors

    def tensor(self, name: str) -> Tensor:
        tensor = self._source.tensor(name)
        dtype = self._stored[name].dtype
        return fp8.dequantize(*fp8.quantize(tensor), torch.float32) if dtype == fp8.E4M3 else tensor.to(dtype)

    def release(self) -> None:
        self._source.release()


def trainer_config(hf_dir: Path) -> Config:
    """Return a config with which one process can build the trainer's model of `hf_dir`."""
    unused = hf_dir / "unused"
    return Config.model_validate(
        {
            "run": {"dir": str(unused)},
            "model": {"path": str(hf_dir), "dtype": "fp32"},
            "parallel": {"distributed_optimizer": False},
            "train": {"steps": 1},
            "data": {"train": str(unused)},
        }
    )


@contextlib.contextmanager
def _without_rank_variables() -> Iterator[None]:
    """Hide torchrun's variables within the context, because only this process builds the model."""
    saved = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)
