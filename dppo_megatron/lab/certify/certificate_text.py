"""Formats a certificate as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .compare import ROUNDINGS, SHARES


def text(certificate: Mapping[str, Any]) -> str:
    return "\n".join(_lines(certificate))


def exceeds(certificate: Mapping[str, Any], within: float) -> bool:
    """Return whether a sampled token's log-prob differs by more than `within` nats, or is NaN."""
    return not sampled(certificate)["largest"] <= within


def sampled(certificate: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the table of log-probs that training compares."""
    return next(iter(certificate["logprobs"].values()))


def _lines(certificate: Mapping[str, Any]) -> Iterator[str]:
    yield f"engine: {certificate['engine']} {certificate['engine_dtype']}, started with {certificate['engine_model']}"
    yield f"trainer: {certificate['trainer_dtype']}, {certificate['layout']}"
    yield f"weights: {certificate['weights']}"
    yield f"{sampled(certificate)['tokens']} tokens of {certificate['samples']} samples"
    yield ""
    headings = "".join(f"{f'> {share:g}':>9}" for share in SHARES)
    yield f"{'log-probs':52}{'0 ULP':>8}{'max ULP':>11}{'KL (k3)':>10}{'mean':>10}{'largest':>10}{headings}"
    for name, table in certificate["logprobs"].items():
        shares = "".join(f"{table[f'above_{share:g}']:9.1%}" for share in SHARES)
        yield (
            f"{name:52}{table['same_bits']:8.1%}{table['max_ulp']:11,}{table['kl']:10.1e}{table['mean']:10.1e}"
            f"{table['largest']:10.1e}{shares}"
        )
    yield ""
    operators = certificate["operators"]
    if isinstance(operators, str):
        yield f"operators: {operators}"
        return
    yield f"operators, in a pass of {certificate['traced_tokens']} tokens (layer by layer: the certificate's JSON)"
    first, entries = certificate["first"], operators["accumulated"]
    num_compared, same = len(entries), sum(not entry["differing"] and not entry["problem"] for entry in entries)
    yield f"  {num_compared} of {certificate['recorded']} recorded values compared, {same} of them have the same bits"
    if first is None:
        return
    entries_by_name = {entry["name"]: entry for entry in operators["own"]}
    yield f"  first to differ: {_described(next(e for e in entries if e['name'] == first))}"
    stream = [e["roundings"] for e in entries if e["operator"] in ("residual", "final_residual")]
    yield f"  the residual's difference, layer by layer, in roundings: {' '.join(f'{r:.1f}' for r in stream)}"
    yield "  given the engine's inputs, its operators differ from the trainer's by themselves:"
    for entry in _kinds(operators["own"]):
        yield f"    {entry['operator']:22}{_described(entry)}"
    first_outlier = certificate["first_beyond_rounding"]
    if first_outlier is None:
        limits = ", ".join(f"{limit:g} in {8 * size} bits" for size, limit in ROUNDINGS.items())
        yield f"  no difference is larger than rounding explains ({limits})"
    else:
        yield f"  first difference larger than rounding explains: {_described(entries_by_name[first_outlier])}"


def _kinds(entries: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the layer with the largest difference for each operator that differs."""
    worst: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        if entry["differing"]:
            previous = worst.setdefault(entry["operator"], entry)
            if entry["roundings"] > previous["roundings"]:
                worst[entry["operator"]] = entry
    yield from worst.values()


def _described(entry: Mapping[str, Any]) -> str:
    if entry["problem"]:
        return f"{entry['name']}: {entry['problem']}"
    share = entry["differing"] / entry["elements"]
    return (
        f"{entry['name']}: {share:.1%} of the elements, max {entry['max_ulp']:,} ULP, "
        f"{entry['largest']:.1e} ({entry['roundings']:.1f} roundings)"
    )
