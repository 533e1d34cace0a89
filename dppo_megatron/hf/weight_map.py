"""Maps between Hugging Face tensors and Megatron GPTModel parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from .errors import ModelError
from .families import FAMILIES
from .hf_config import HFModelConfig
from .rules import Entry, HFTensor, MegatronLayout, Rule

_LAYER = re.compile(r"(?<=\bdecoder\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+(?=\.)|(?<=\.experts\.linear_fc[12]\.weight)\d+$")

_ROTARY_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # written by old transformers


class WeightMap:
    """Maps a model's names, shapes and tensor-parallel shards. Needs no files, process groups or model instance.

    `layout` has the shapes that the HF config does not define; by default the vocabulary is not padded. Megatron names
    have GLOBAL layer and expert indices (see `megatron_model.named_weights`), in the spelling of either layer spec,
    local or TransformerEngine.
    """

    def __init__(self, config: HFModelConfig, layout: MegatronLayout | None = None):
        self.config = config
        self.layout = layout or MegatronLayout(padded_vocab_size=config.vocab_size)
        if self.layout.padded_vocab_size < config.vocab_size:
            rows = self.layout.padded_vocab_size
            raise ModelError(config.source, [f"vocab_size = {config.vocab_size}: the embedding has only {rows} rows"])
        self._rules = FAMILIES[config.family].rules(config, self.layout)
        # A spelling may serve dense layers in one rule and expert layers in another.
        self._by_name: dict[str, list[Rule]] = {}
        for rule in self._rules:
            for name in rule.megatron:
                self._by_name.setdefault(name, []).append(rule)
        mtp_patterns = (rf"model\.layers\.{config.num_layers + i}\..*" for i in range(config.mtp_layers))
        self._ignored = re.compile("|".join((_ROTARY_BUFFERS, *mtp_patterns, *[r"mtp\..*"] * bool(config.mtp_layers))))

    def entry(self, megatron_name: str) -> Entry:
        """Return a parameter's entry. Raises `ModelError` with the family name if the entry does not exist."""
        layer, template = _extract(_LAYER, megatron_name, "{layer}")
        expert, template = _extract(_EXPERT, template, "{expert}")
        for rule in self._by_name.get(template, ()):
            in_layer = rule.layers is None or layer in rule.layers
            if in_layer and (expert is None or expert < rule.experts):
                return _instance(rule, megatron_name, layer, expert)
        raise ModelError(self.config.source, [f"{megatron_name}: no HF counterpart in family {self.config.family}"])

    def entries(self) -> Iterator[Entry]:
        """Yield every entry once, under the local spec's name: embedding, layers in order, final norm, head."""
        first, *last = self.end_entries()
        yield first
        for layer in range(self.config.num_layers):
            yield from self.layer_entries(layer)
        yield from last

    def end_entries(self) -> list[Entry]:
        """Return the entries outside the layers: embedding, final norm, head."""
        rules = [rule for rule in self._rules if rule.layers is None]
        return [_instance(rule, rule.megatron[0], None, None) for rule in rules]

    def layer_entries(self, layer: int, experts: Sequence[int] | None = None) -> Iterator[Entry]:
        """Yield a layer's entries, for all experts or only for the global indices in `experts`."""
        for rule in self._rules:
            if rule.layers is None or layer not in rule.layers:
                continue
            indices = [None] if not rule.experts else range(rule.experts) if experts is None else experts
            for expert in indices:
                yield _instance(rule, rule.megatron[0].format(layer=layer, expert=expert), layer, expert)

    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor in the model's complete HF directory, by name."""
        return {t.name: t.shape for entry in self.entries() if not entry.rule.duplicate for t in entry.hf}

    def is_ignored(self, hf_name: str) -> bool:
        """Return whether a directory may contain the name although the model does not need it."""
        return self._ignored.fullmatch(hf_name) is not None

    def to_megatron(self, entry: Entry, hf_tensors: Mapping[str, Tensor], tp_rank: int = 0, tp_size: int = 1) -> Tensor:
        """Return the shard for tensor-parallel (for experts: expert-tensor-parallel) rank `tp_rank` of `tp_size`.

        May return a view of an input. Raises `ModelError` for absent or misshaped inputs and sizes that do not divide.
        """
        parts = []
        for expected in entry.hf:
            tensor = hf_tensors.get(expected.name)
            if tensor is None or tuple(tensor.shape) != expected.shape:
                actual = "absent" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise ModelError(entry.megatron, [f"{expected.name}: {actual}, expected shape {expected.shape}"])
            parts.append(tensor)
        try:
            return entry.op.to_shard(parts, tp_rank, tp_size)
        except ValueError as error:
            raise ModelError(entry.megatron, [str(error)]) from None

    def to_hf(self, entry: Entry, shards: Tensor | Sequence[Tensor]) -> dict[str, Tensor]:
        """Return HF tensors from the whole Megatron tensor, or from all ranks' shards in rank order.

        A replicated parameter needs only one shard. If an HF tensor stacks experts, returns only this expert's
        part. May return views of the inputs. Raises `ModelError` if the shards do not have the HF shapes.
        """
        shards = [shards] if isinstance(shards, Tensor) else list(shards)
        try:
            parts = entry.op.from_shards(shards)
        except RuntimeError as error:
            raise ModelError(entry.megatron, [f"shards {[tuple(s.shape) for s in shards]}: {error}"]) from None
        for expected, part in zip(entry.hf, parts, strict=True):
            shape = expected.shape[1:] if entry.stacks_experts else expected.shape
            if tuple(part.shape) != shape:
                raise ModelError(entry.megatron, [f"{expected.name}: shape {tuple(part.shape)}, expected {shape}"])
        return {expected.name: part for expected, part in zip(entry.hf, parts, strict=True)}


def _extract(pattern: re.Pattern[str], name: str, field: str) -> tuple[int | None, str]:
    match = pattern.search(name)
    if match is None:
        return None, name
    return int(match.group()), name[: match.start()] + field + name[match.end() :]


def _instance(rule: Rule, megatron: str, layer: int | None, expert: int | None) -> Entry:
    hf = tuple(HFTensor(t.name.format(layer=layer, expert=expert), t.shape) for t in rule.hf)
    return Entry(megatron, hf, rule, layer, expert)
