"""The section `rollout`: what is sampled, how, and how old it may be when it is trained on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .section import Count, CountFromZero, FilePath, Float, Int, Positive, Section, TokenId


class RolloutConfig(Section):
    prompts_per_step: Count = Field(64, description="prompts, and so groups, of a step")
    group_size: Count = Field(8, description="samples per prompt")
    max_response_tokens: Count = Field(1024, description="a longer response is cut there, and counts as truncated")
    temperature: Float = Field(
        1.0, ge=0.01, le=100, description="of sampling and of the log-probs; vLLM raises smaller ones to 0.01"
    )
    top_p: Float = Field(
        1.0,
        ge=0,
        le=1,
        description="below 1: sample from the fewest tokens that hold so much probability; engines report what top_p, "
        "top_k and min_p left of every position, and training renormalises over the same tokens",
    )
    top_k: Int = Field(
        -1, ge=-1, le=10**9, description="sample from so many most likely tokens; -1 = all; top_p and min_p need it"
    )
    min_p: Float = Field(
        0.0, ge=0, le=1, description="sample from tokens with at least this share of the most likely one's probability"
    )
    stop_token_ids: tuple[TokenId, ...] = Field((), description="besides the tokenizer's end-of-sequence token")
    topk_logprobs: CountFromZero = Field(
        0, description="K of the top-K tokens kept of the rollout policy; top-K methods need > 0"
    )
    max_staleness: CountFromZero = Field(0, description="policy versions a rollout may lag behind; 0 = synchronous")
    on_update: Literal["keep", "wait", "abort"] = Field(
        "keep",
        description="requests that run when weights change: keep = go on under the new weights, wait = end first "
        "under the old ones, abort = end at once and be continued from their tokens by new requests",
    )
    beyond_bound: Literal["wait", "drop", "train"] = Field(
        "wait",
        description="a group still sampled when the last step that may train on it needs it: wait = the step waits, "
        "drop = the group is given up and another prompt begun, train = it is trained on later, beyond max_staleness",
    )
    max_mismatch_kl: Positive | None = Field(
        None,
        description="largest mismatch/kl (engine against trainer, nats per token) of a step; more ends the run; "
        "default: no limit",
    )
    max_concurrent_groups: Count = Field(256, description="groups that are sampled at once")
    dynamic_sampling: bool = Field(
        False, description="groups whose rewards are all equal are dropped and other prompts sampled for them (DAPO)"
    )
    max_prompts_per_group: Count = Field(
        8, ge=2, description="dynamic_sampling: most prompts for each group of a step, on average; more is an error"
    )
    routing_replay: bool = Field(
        False, description="MoE: engines return the experts of every token and the trainer routes by them (R3)"
    )
    bank: FilePath | None = Field(
        None, description="train on the rollouts of this existing bank: nothing is sampled, no engine is started"
    )

    @property
    def has_sampling_mask(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary, which the trainer then replays."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def mask_request(self) -> dict[str, Any]:
        """The fields of a `GenerateRequest` that set the sampling mask."""
        if not self.has_sampling_mask:
            return {}
        return {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p, "sampling_mask": True}
