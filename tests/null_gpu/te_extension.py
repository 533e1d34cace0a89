"""Replaces TransformerEngine's compiled module: torch computes the few functions that our layers call.

TransformerEngine's own Python runs as it is, so a call of its modules with a wrong argument fails as it does on a GPU.
`install` must run before anything imports Megatron-core. Functions that are not here raise with their name.
Positions of arguments are those of TransformerEngine 2.20's calls.
"""

import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

NAME = "transformer_engine_torch"
calls: Counter[str] = Counter()
DType = IntEnum("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1", start=0)
TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
FP8FwdTensors = IntEnum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    start=0,
)
FP8BwdTensors = IntEnum(
    "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3", start=0
)


def install() -> None:
    """Import TransformerEngine with this module as its compiled one. Needs its Python on the path."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it then looks for none of its libraries
    spec = importlib.util.find_spec("transformer_engine")
    package = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    sys.modules[NAME] = _module(Path(spec.origin).parent)
    spec.loader.exec_module(package)


def _module(package: Path) -> ModuleType:
    module = ModuleType(NAME)
    found: dict[str, set[str]] = {}
    used = set(FUNCTIONS)
    for source in package.glob("pytorch/**/*.py"):
        for kind, member in re.findall(r"\b(NVTE\w+)\.(NVTE_\w+)", source.read_text()):
            found.setdefault(kind, set()).add(member)
        used |= set(re.findall(r"\btex\.([a-z]\w+)", source.read_text()))
    for kind, members in found.items():
        setattr(module, kind, IntEnum(kind, sorted(members), start=0))
    for name in ("DType", "FP8FwdTensors", "FP8BwdTensors"):
        setattr(module, name, globals()[name])
    for name, function in FUNCTIONS.items():
        setattr(module, name, _counted(name, function))
    module.__all__ = sorted(used)
    module.__getattr__ = _absent
    module.backend = module.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    return module


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return function(*arguments, **named)

    return counted


class _Enumeration(type):
    """An enumeration that only TransformerEngine's import reads: every member exists and has its own number."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        members = cls.__dict__.get("members", ())
        cls.members = *members, name
        setattr(cls, name, len(members))
        return len(members)


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return _Enumeration(name, (), {})

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{NAME}.{name} has no stand-in: add it to {Path(__file__).name}")

    return absent


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool) -> Tensor:
    """Return the row-major b @ a, each transposed by its flag: cuBLAS reads matrices column by column."""
    rows = b.reshape(-1, b.shape[-1])
    left = rows.T if transb else rows
    flat = a.reshape(-1, a.shape[-1])
    out = left @ (flat.T if transa else flat)
    return out if transb else out.view(*b.shape[:-1], out.shape[-1])


def generic_gemm(
    a: Tensor, transa: bool, b: Tensor, transb: bool, out: Tensor | None, quantizer: Any, out_dtype: Any, bias: Any,
    bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Tensor, workspace_size: int, accumulate: bool,
    use_split_accumulator: bool, *, comm_overlap: Any, comm_type: Any, extra_output: Any, bulk_overlap: bool,
    alpha: float, beta: float | None,
) -> tuple[Tensor, Tensor | None, None, None]:  # fmt: skip
    if quantizer is not None or gelu or comm_overlap is not None:
        raise NotImplementedError("only plain products have a stand-in")
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    made = _product(a, transa, b, transb)
    if bias is not None and not grad:
        made = made + bias
    bias_grad = b.reshape(-1, b.shape[-1]).sum(0) if bias is not None and grad else None
    if out is None:
        return made.to(TORCH[DType(int(out_dtype))] if out_dtype is not None else a.dtype), bias_grad, None, None
    out.add_(made) if accumulate else out.copy_(made.view_as(out))
    return out, bias_grad, None, None


def te_general_grouped_gemm(
    a: list[Tensor], transa: bool, b: list[Tensor], transb: bool, out: list[Tensor], out_dtype: Any, m_splits: Any,
    bias: list[Tensor], bias_dtype: Any, single_output: bool, gelu_in: Any, grad: bool, workspaces: Any, size: int,
    accumulate: bool, use_split_accumulator: bool, sm_count: int,
) -> list[Tensor]:  # fmt: skip
    outs = out[0].split([int(m) for m in m_splits]) if single_output else out
    for left, right, into in zip(a, b, outs, strict=True):
        made = _product(left, transa, right, transb)
        into.add_(made) if accumulate else into.copy_(made)
    return bias


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: Any, sm_margin: int, centred: bool
) -> tuple[Tensor, None, Tensor]:
    assert quantizer is None
    wide = x.float()
    rsigma = wide.pow(2).mean(-1).add(eps).rsqrt()
    made = (wide * rsigma[:, None] * (weight.float() + centred)).to(TORCH[DType(int(dtype))])
    return made if out is None else out.copy_(made), None, rsigma


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, centred: bool
) -> tuple[Tensor, Tensor]:
    normal = x.float() * rsigma[:, None]
    scaled = dy.float() * (weight.float() + centred)
    dx = rsigma[:, None] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.float() * normal).sum(0).to(weight.dtype)


def _rotated(t: Tensor, freqs: Tensor, cu_seqlens: Tensor, interleaved: bool, sign: int) -> Tensor:
    """thd: each sequence from position 0."""
    rows = torch.arange(t.shape[0], device=t.device)
    starts = cu_seqlens.long()[torch.bucketize(rows, cu_seqlens[1:].long(), right=True).clamp_max(len(cu_seqlens) - 2)]
    angles = freqs.view(freqs.shape[0], -1)[rows - starts][:, None]
    size = angles.shape[-1]
    x, rest = t[..., :size].float(), t[..., size:]
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
    return torch.cat(((x * angles.cos() + sign * turned * angles.sin()).to(t.dtype), rest), dim=-1)


def fused_rope_forward(
    t: Tensor, freqs: Tensor, start: Any, layout: Any, interleaved: bool, cu_seqlens: Tensor, cp_size: int, cp_rank: int
) -> Tensor:
    assert (cp_size, start, cu_seqlens.dtype, freqs.dtype) == (1, None, torch.int32, torch.float32)
    return _rotated(t, freqs, cu_seqlens, interleaved, 1)


def fused_rope_backward(
    t: Tensor, freqs: Tensor, start: Any, layout: Any, interleaved: bool, cu_seqlens: Tensor, cp_size: int, cp_rank: int
) -> Tensor:
    return _rotated(t, freqs, cu_seqlens, interleaved, -1)


def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal, of [T, heads, d], sequence by sequence."""
    parts = []
    ends = cu_seqlens.tolist()
    for first, last in pairwise(ends):
        if first < last:
            one = [x[first:last].transpose(0, 1)[None] for x in (q, k, v)]
            with sdpa_kernel([SDPBackend.MATH]):  # the other kernels have no values here
                out = F.scaled_dot_product_attention(*one, is_causal=True, scale=scale, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def fused_attn_fwd(*a: Any) -> list[Tensor]:
    scale, mask, window, cu_q, cu_kv, q, k, v = a[3], a[10], a[12], a[14], a[15], a[16], a[17], a[18]
    assert (mask.name, a[6].name) == ("NVTE_PADDING_CAUSAL_MASK", "NVTE_THD_THD_THD"), (mask, a[6])
    assert tuple(window) in ((-1, -1), (-1, 0)), window
    assert cu_q.dtype == cu_kv.dtype == torch.int32, (cu_q.dtype, cu_kv.dtype)
    with torch.no_grad():
        out = _attention(q, k, v, cu_q, scale).contiguous()
    stats = torch.zeros(q.shape[0], q.shape[1], 1, dtype=torch.float32, device=q.device)
    return [out, stats, torch.zeros(2, dtype=torch.int64, device=q.device)]


def fused_attn_bwd(*a: Any) -> list[Tensor | None]:
    scale, cu_q, grad = a[2], a[17], a[23]
    inputs = [x.detach().requires_grad_() for x in a[19:22]]
    with torch.enable_grad():
        out = _attention(*inputs, cu_q, scale)
        grads = torch.autograd.grad(out, inputs, grad.view_as(out))
    return [*grads, None, None]


def get_fused_attn_backend(*_: Any, **__: Any) -> tuple[int, str]:
    return int(sys.modules[NAME].backend), ""


def multi_tensor_adam(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float, step: int,
    adam_w: int, bias_correction: int, decay: float,
) -> None:  # fmt: skip
    assert (adam_w, bias_correction) == (1, 1)
    grads, weights, firsts, seconds, *masters = lists
    for i, (g, w, m, v) in enumerate(zip(grads, weights, firsts, seconds, strict=True)):
        assert m.dtype == v.dtype == torch.float32, (m.dtype, v.dtype)
        assert w.dtype == torch.float32 or masters, w.dtype
        at = masters[0][i] if masters else w
        m.mul_(beta1).add_(g.float(), alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g.float(), g.float(), value=1 - beta2)
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + decay * at
        at.sub_(lr * update)
        if masters:
            w.copy_(at)


def multi_tensor_l2norm(chunk: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, Tensor]:
    norms = torch.stack([t.float().norm() for t in lists[0]])
    return norms.norm()[None], norms if per_tensor else norms[:0]


def multi_tensor_scale(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    for source, into in zip(*lists, strict=True):
        into.copy_(source * scale)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, fused_rope_forward, fused_rope_backward,
        fused_attn_fwd, fused_attn_bwd, get_fused_attn_backend, multi_tensor_adam, multi_tensor_l2norm,
        multi_tensor_scale,
    )
} | {
    "get_cublasLt_version": lambda: 130100,
    "get_cudnn_version": lambda: 92000,
    "get_num_cublas_streams": lambda: 4,
    "ubuf_built_with_mpi": lambda: False,
    "device_supports_multicast": lambda *_: False,
    "get_stream_priority_range": lambda *_: (0, -5),
}  # fmt: skip
