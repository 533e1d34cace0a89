"""Define the bodies of requests to our routes. Any other body is rejected with a line that names the field."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dppo_megatron.rollout.engines.protocol import GenerateRequest, UpdateMode
from dppo_megatron.weights.broadcast_plan import Int32, Seconds, Text

SHOWN = 3  # number of wrong fields in an error
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # the routes check ids against the vocabulary


class Body(BaseModel):
    """Requires a JSON object with exactly these fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class GenerateBody(Body):
    request_id: Text
    token_ids: list[TokenId]
    n: Annotated[int, Field(le=2**16)]
    seeds: list[int]
    temperature: float
    max_tokens: Int32
    stop_token_ids: list[Int32] = []
    topk: Annotated[int, Field(lt=2**31)] = 0
    routed_experts: bool = False
    top_p: float = 1.0
    top_k: Annotated[int, Field(lt=2**31)] = 0
    min_p: float = 0.0
    sampling_mask: bool = False
    flags: tuple[Text, ...] = ()
    drafts: list[list[TokenId]] = []
    scored: bool = False

    def request(self) -> GenerateRequest:
        """Return the request. Raises ValueError for values that `GenerateRequest` rejects."""
        drafts = tuple(np.array(tokens, np.int32) for tokens in self.drafts)
        return GenerateRequest(**dict(self) | {"drafts": drafts})


class ScoreBody(Body):
    token_ids: list[TokenId]


class AbortBody(Body):
    request_id: Text


class LoadBody(Body):
    path: Text
    version: Int32
    mode: UpdateMode
    wait_s: Seconds
    read_ahead_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0


class ReceiveBody(Body):
    group: Text
    step: Text
    version: Int32
    mode: UpdateMode
    wait_s: Seconds


BodyT = TypeVar("BodyT")


def parse(kind: type[BodyT], body: bytes) -> BodyT:
    """Return the parsed body. Raises ValueError with a single line that names the wrong fields."""
    try:
        return TypeAdapter(kind).validate_json(body, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
        raise ValueError("; ".join(map(_describe, wrong[:SHOWN])) + ("; ..." if len(wrong) > SHOWN else "")) from None


def _describe(wrong: Any) -> str:
    where = ".".join(str(part)[:100] for part in wrong["loc"])
    return f"{where}: {wrong['msg']}" if where else f"body: {wrong['msg']}"
