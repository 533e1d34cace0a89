"""Format 1, which runs that began under it go on in: a group's samples stand together in each tensor.

Its lines have no crc32 of their own, and a reader needs the whole blob to get one sample.
"""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from dppo_megatron.types import Prompt, Rollout, RolloutGroup

from .lines import group_fields, plain

FORMAT = "1"


def encode_group(group: RolloutGroup) -> bytes:
    """The blob of a group that passed `checks.check_group`. Raises `ValueError` for what this format cannot hold."""
    if group.turn_rewards is not None or any(
        value is not None for r in group.rollouts for value in (r.spans, r.trajectory, r.kept_ids)
    ):
        raise ValueError(
            f"group of prompt position {group.prompt.position}: turns, branches and sampling masks need a bank of "
            "format 2, this run began in format 1; start a new run directory"
        )
    rollouts = group.rollouts
    tensors = {
        "prompt_ids": np.ascontiguousarray(group.prompt.token_ids),
        "lengths": np.array([len(r.token_ids) for r in rollouts], dtype=np.int32),
        "response_ids": np.concatenate([r.token_ids for r in rollouts]),
        "logprobs": np.concatenate([r.rollout_logprob for r in rollouts]),
        "versions": np.concatenate([r.versions for r in rollouts]),
        "rewards": np.ascontiguousarray(group.rewards),
        "reward_failed": np.ascontiguousarray(group.reward_failed),
    }
    if rollouts[0].topk_ids is not None:
        tensors["topk_ids"] = np.concatenate([r.topk_ids for r in rollouts])
        tensors["topk_logprobs"] = np.concatenate([r.rollout_topk_logprob for r in rollouts])
    if rollouts[0].routed_experts is not None:
        tensors["routed_experts"] = np.concatenate([r.routed_experts for r in rollouts])
    metadata = {
        "format": FORMAT,
        "position": str(group.prompt.position),
        "row": str(group.prompt.row),
        "temperature": repr(float(group.temperature)),
        "finish_reasons": ",".join(r.finish_reason for r in rollouts),
        "text": group.prompt.text,
        "answer": group.prompt.answer,
    }
    return save_tensors(tensors, metadata=metadata)


def decode_group(blob: bytes) -> RolloutGroup:
    """Inverse of `encode_group`. Raises `ValueError` for a blob of another format version."""
    header_size = int.from_bytes(blob[:8], "little")
    metadata = json.loads(blob[8 : 8 + header_size]).get("__metadata__", {})
    if metadata.get("format") != FORMAT:
        raise ValueError(f"bank format {metadata.get('format')!r}, this version reads {FORMAT!r}")
    tensors = load_tensors(blob)
    lengths = tensors["lengths"]

    def split(name: str, more: int = 0) -> list[Any]:
        ends = np.cumsum(lengths + more)[:-1]
        return np.split(tensors[name], ends) if name in tensors else [None] * len(lengths)

    parts = zip(
        split("response_ids"),
        split("logprobs"),
        split("versions"),
        metadata["finish_reasons"].split(","),
        split("topk_ids"),
        split("topk_logprobs"),
        split("routed_experts", len(tensors["prompt_ids"]) - 1),
        strict=True,
    )
    prompt = Prompt(
        position=int(metadata["position"]),
        row=int(metadata["row"]),
        token_ids=tensors["prompt_ids"],
        text=metadata["text"],
        answer=metadata["answer"],
    )
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(Rollout(*part) for part in parts),
        rewards=tensors["rewards"],
        reward_failed=tensors["reward_failed"],
        temperature=float(metadata["temperature"]),
    )


def group_line(group: RolloutGroup, offset: int, blob: bytes) -> bytes:
    """The index line of a group whose blob starts at `offset`, newline included."""
    routed = group.rollouts[0].routed_experts
    return plain(
        kind="group",
        position=int(group.prompt.position),
        row=int(group.prompt.row),
        offset=offset,
        bytes=len(blob),
        crc32=zlib.crc32(blob),
        **group_fields(group),
        routing=None if routed is None else routed.shape[1:],
        time=round(time.time(), 3),
    )
