"""Makes random cases with a float64 full-vocabulary reference for the tests of vocab_parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Half a unit in the last place, relative: the error of rounding a gradient to the logits' dtype.
HALF_ULP = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


@dataclass(frozen=True)
class Case:
    """Describes a random case.

    - columns: columns in each rank's shard, with padding
    - vocab: valid columns in all
    - topk: K, or None for no list
    - kept: most rows have a sampling mask
    """

    seed: int
    tokens: int
    columns: tuple[int, ...]
    vocab: int | None
    topk: int | None
    dtype: str = "fp32"
    spread: float = 3.0
    peaked: bool = False
    temperature: str = "one"
    entropy: str = "differentiable"
    layout: str = "contiguous"
    kept: bool = False

    @property
    def valid(self) -> int:
        return sum(self.columns) if self.vocab is None else self.vocab


@dataclass(frozen=True)
class Inputs:
    logits: Tensor
    target: Tensor
    topk: Tensor | None
    temperature: float | Tensor
    weights: tuple[Tensor, Tensor, Tensor, Tensor]
    sampling_mask_ids: Tensor | None = None
    sampling_mask_counts: Tensor | None = None

    def to(self, device: str) -> Inputs:
        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return Inputs(**tree_map(move, vars(self)))


@st.composite
def cases(draw: st.DrawFn, world: int = 1) -> Case:
    uneven = draw(st.booleans())
    size = draw(st.integers(1, 40))
    columns = tuple(draw(st.integers(1, 40)) if uneven else size for _ in range(world))
    total = sum(columns)
    # Down to a single valid column, so that whole shards are padding.
    vocab = draw(st.one_of(st.none(), st.integers(1, total), st.integers(max(1, total - 5), total)))
    return Case(
        seed=draw(st.integers(0, 2**20)),
        tokens=draw(st.sampled_from((0, 1, 2, 7, 13))),
        columns=columns,
        vocab=vocab,
        topk=draw(st.sampled_from((None, 0, 1, 5, 8))),
        dtype=draw(st.sampled_from(tuple(DTYPES))),
        spread=draw(st.sampled_from((0.1, 3.0, 12.0))),
        peaked=draw(st.booleans()),
        temperature=draw(st.sampled_from(("one", "float", "tensor"))),
        entropy=draw(st.sampled_from(("none", "metric", "differentiable"))),
        layout=draw(st.sampled_from(("contiguous", "transposed", "sliced"))),
        kept=draw(st.booleans()),
    )


def make_inputs(case: Case) -> Inputs:
    """Make full-vocabulary inputs, equal on all ranks. Lists have duplicates, absent ids and often the target."""
    random = torch.Generator().manual_seed(case.seed)
    rows, valid = case.tokens, case.valid
    logits = torch.randn(rows, sum(case.columns), generator=random) * case.spread
    if case.peaked and rows:
        top = torch.randint(0, valid, (rows,), generator=random)
        logits[torch.arange(rows), top] += 25.0
    logits[:, valid:] = 1e4  # padding would dominate if it were read
    target = torch.randint(0, valid, (rows,), generator=random)
    topk = None
    if case.topk is not None:
        topk = torch.randint(-1, valid, (rows, case.topk), generator=random)
        if case.topk:
            topk[::2, 0] = target[::2]
        if case.topk > 4:
            topk[::3, 1], topk[1::3, 2] = topk[::3, 3], -1
    temperature: float | Tensor = {"one": 1.0, "float": 0.7}.get(case.temperature, 0.0)
    if case.temperature == "tensor":
        temperature = torch.rand(rows, generator=random) + 0.5
    shapes = ((rows,), (rows,), (rows, case.topk or 0), (rows,))
    weights = tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    sampling_mask_ids = sampling_mask_counts = None
    if case.kept:
        inside = torch.rand(rows, valid, generator=random) < torch.rand(rows, 1, generator=random)
        inside[torch.arange(rows), target] = True
        if topk is not None:
            topk[~inside.gather(1, topk.clamp_min(0))] = -1
        inside[3::4] = False  # such a row is over the whole vocabulary
        sampling_mask_counts, sampling_mask_ids = inside.sum(dim=1), inside.nonzero()[:, 1]
        if case.seed % 2:
            sampling_mask_counts, sampling_mask_ids = sampling_mask_counts.int(), sampling_mask_ids.int()
    return Inputs(
        logits.to(DTYPES[case.dtype]), target, topk, temperature, weights, sampling_mask_ids, sampling_mask_counts
    )


def masked(logits: Tensor, inputs: Inputs) -> Tensor:
    """Return the logits [T, V] over the whole vocabulary, with -inf outside the sampling masks."""
    if inputs.sampling_mask_counts is None:
        return logits
    rows = torch.arange(len(logits)).repeat_interleave(inputs.sampling_mask_counts.long())
    inside = torch.zeros_like(logits, dtype=torch.bool).index_put_(
        (rows, inputs.sampling_mask_ids.long()), torch.tensor(True)
    )
    return logits.masked_fill(~inside & (inputs.sampling_mask_counts > 0)[:, None], float("-inf"))


def lay_out(shard: Tensor, layout: str) -> Tensor:
    """Return equal values with other strides."""
    if layout == "transposed":
        return shard.t().contiguous().t()
    if layout == "sliced":
        wide = torch.full((shard.shape[0], shard.shape[1] + 3), float("nan")).to(shard)
        wide[:, : shard.shape[1]] = shard
        return wide[:, : shard.shape[1]]
    return shard.clone()


def weighted(values: tuple[Tensor | None, ...], weights: tuple[Tensor, ...], entropy_gradient: bool) -> Tensor:
    """Sum weighted logprob, entropy, topk_logprob and other_logprob, without infinite values (absent ids)."""
    total = torch.zeros((), dtype=torch.float64)
    for number, (value, weight) in enumerate(zip(values, weights, strict=True)):
        if value is None or (number == 1 and not entropy_gradient):
            continue
        total = total + (weight * value.double().masked_fill(~torch.isfinite(value), 0.0)).sum()
    return total


@dataclass(frozen=True)
class Reference:
    logprob: Tensor
    entropy: Tensor
    topk_logprob: Tensor | None
    other_logprob: Tensor | None
    gradient: Tensor  # [T, all columns]
    arriving: Tensor  # [T, 1] sum of absolute gradients that arrive at a row's statistics, divided by temperature


def reference(case: Case, inputs: Inputs) -> Reference:
    full = inputs.logits.double().detach().clone().requires_grad_()
    temperature = inputs.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.double().unsqueeze(1)
    logp = torch.log_softmax(masked(full[:, : case.valid], inputs) / temperature, dim=1)
    logprob = logp.gather(1, inputs.target.unsqueeze(1)).squeeze(1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(dim=1)
    topk = other = None
    if inputs.topk is not None:
        present = inputs.topk >= 0
        topk = logp.gather(1, inputs.topk.clamp_min(0)).masked_fill(~present, float("-inf"))
        in_s = torch.zeros_like(logp, dtype=torch.bool).scatter_(1, inputs.target.unsqueeze(1), True)
        row, slot = present.nonzero(as_tuple=True)
        in_s[row, inputs.topk[row, slot]] = True
        rest = logp.masked_fill(in_s, float("-inf"))
        alive = (rest > -torch.inf).any(dim=1)
        other = torch.full_like(logprob, float("-inf"))
        other = other.masked_scatter(alive, rest[alive].logsumexp(dim=1))
    values = (logprob, entropy, topk, other)
    weighted(values, inputs.weights, case.entropy == "differentiable").backward()
    detached = [None if value is None else value.detach() for value in values]
    columns = [weight.abs().unsqueeze(1) if weight.dim() == 1 else weight.abs() for weight in inputs.weights]
    arriving = torch.cat(columns, dim=1).sum(dim=1, keepdim=True) / temperature
    return Reference(*detached, gradient=full.grad, arriving=arriving)


def assert_close_to_reference(
    case: Case, expected: Reference, values: dict[str, Tensor | None], gradient: Tensor | None, slack: float = 1.0
) -> None:
    """Check values by field name, and gradient [T, all columns] if given. slack: factor on the CPU's rounding."""
    tiny = slack * (1e-12 if case.dtype == "fp64" else 2e-6)
    for name in ("logprob", "entropy", "topk_logprob", "other_logprob"):
        found, wanted = values[name], getattr(expected, name)
        if name == "entropy" and case.entropy == "none":
            assert found is None
            continue
        assert (found is None) == (wanted is None), name
        if wanted is None:
            continue
        assert found.shape == wanted.shape, name
        assert found.dtype == (torch.float64 if case.dtype == "fp64" else torch.float32), name
        finite = torch.isfinite(wanted)
        assert torch.equal(finite, torch.isfinite(found)), name
        assert torch.equal(found[~finite].double(), wanted[~finite]), name
        # 2e-6 absolute, plus three units in the last place, because fp32 cannot represent -80 so closely.
        error = (found.double() - wanted)[finite].abs() - slack * 3.6e-7 * wanted[finite].abs()
        assert error.numel() == 0 or error.max() <= tiny, f"{name}: {error.max():.2e}"
    if gradient is None:
        return
    wanted = expected.gradient
    assert gradient.shape == wanted.shape
    assert torch.equal(gradient[:, case.valid :], torch.zeros_like(gradient[:, case.valid :]))
    if wanted.numel() == 0:
        return
    largest = wanted.abs().amax(dim=1, keepdim=True)
    exact = case.dtype == "fp64"
    # Relative to the row's gradient, plus a unit in the last place of the terms that may cancel.
    allowed = (1e-12 if exact else 1e-6) * largest + (1e-15 if exact else 1.2e-7) * expected.arriving
    allowed = slack * allowed + HALF_ULP[case.dtype] * 1.01 * wanted.abs()
    if case.dtype == "fp16":
        allowed = allowed + 2.0**-25  # half of fp16's smallest step
    excess = (gradient.double() - wanted).abs() - allowed
    assert excess.max() <= 0, f"gradient: {excess.max():.2e} over the allowed error"
