"""Defines the pydantic schema of `config.json`: types, bounds, and transformers' defaults for absent keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dppo_megatron.errors import shown

from .hf_config import DeltaNetConfig, MLAConfig, MoEConfig, SinksConfig

Size = Annotated[int, Field(ge=1, lt=1 << 31)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Heads = Annotated[int, Field(ge=1, le=1 << 16)]
FromZero = Annotated[int, Field(ge=0, le=1 << 16)]
Experts = Annotated[int, Field(ge=1, le=1 << 16)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
M = TypeVar("M", bound=BaseModel)

_TYPES = {
    "int_type": "int", "float_type": "int or float", "bool_type": "bool", "string_type": "str", "list_type": "list",
    "dict_type": "an object",
}  # fmt: skip


class _Fields(BaseModel):
    # Strict: "64" is not a size and true is not a number. A null counts as absent.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class RawConfig(_Fields):
    """Contains the keys that every family has. A family with more keys derives a class and overrides the methods."""

    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    rms_norm_eps: Annotated[float, Field(ge=0)] = 1e-6
    rope_theta: Positive = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: Share | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    dtype: str | None = Field(None, validation_alias=AliasChoices("dtype", "torch_dtype"))
    bos_token_id: int | None = None
    eos_token_id: Annotated[list[int], BeforeValidator(lambda v: v if isinstance(v, list) else [v])] = Field([])
    pad_token_id: int | None = None
    quantization_config: dict[str, Any] | None = None

    def experts(self) -> MoEConfig | None:
        """Return the model's experts, or None for a dense model."""
        return None

    def latent_attention(self) -> MLAConfig | None:
        """Return the sizes of latent attention, or None for grouped-query attention."""
        return None

    def delta_net(self) -> DeltaNetConfig | None:
        """Return the sizes of gated delta net layers, or None if every layer has attention."""
        return None

    def sinks(self) -> SinksConfig | None:
        """Return the attention sinks, windows and SwiGLU limit, or None."""
        return None

    def qkv_bias(self) -> bool:
        """Return whether queries, keys and values have biases, if config.json and not the family decides this."""
        return False

    def qk_norm(self) -> bool:
        """Return whether each head's queries and keys are normalized, if config.json decides this."""
        return False

    def mtp_layers(self) -> int:
        """Return the number of multi-token prediction layers stored after the model."""
        return 0

    def problems(self, raw: Mapping[str, Any]) -> list[str]:
        """Return problems that the types do not show, one line each. `raw` is the file as read, nulls included."""
        return []


class RopeSettings(_Fields):
    """Contains the numbers of `rope_scaling` (transformers 4) or `rope_parameters` (5)."""

    rope_theta: Positive | None = None
    partial_rotary_factor: Share | None = None


class Llama3Rope(RopeSettings):
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Positive


class YarnRope(RopeSettings):
    factor: Positive
    original_max_position_embeddings: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    truncate: bool = True


ROPE_TYPES: Mapping[str, type[RopeSettings]] = {"default": RopeSettings, "llama3": Llama3Rope, "yarn": YarnRope}


def read_fields(model: type[M], raw: Mapping[str, Any], problems: list[str], prefix: str = "") -> M:
    """Validate `raw` as `model`.

    Every missing or wrong field adds a line to `problems` that begins with `prefix` and the field name. The field then
    counts as absent, or as 1 if it is required, so that one pass finds all problems in a file.
    """
    present = {name: value for name, value in raw.items() if value is not None}
    try:
        return model.model_validate(present)
    except ValidationError as error:
        errors = error.errors()
    problems += [prefix + _problem(error, present) for error in errors]
    wrong_fields = {error["loc"][0] for error in errors}
    usable = {name: value for name, value in present.items() if name not in wrong_fields}
    try:
        return model.model_validate(usable)
    except ValidationError as error:
        return model.model_validate(usable | {missing["loc"][0]: 1 for missing in error.errors()})


def _problem(error: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    name = error["loc"][0]
    if error["type"] == "missing":
        return f"{name}: missing"
    value = shown(error["input"])
    if error["type"] == "greater_than_equal":
        return f"{name} = {value}: must be at least {error['ctx']['ge']:g}"
    if error["type"] == "greater_than":
        return f"{name} = {value}: must be above {error['ctx']['gt']:g}"
    if error["type"] in ("less_than", "less_than_equal"):
        return f"{name} = {value}: more than any model has"
    return f"{name} = {value}: must be {_TYPES.get(error['type'], error['msg'])}"
