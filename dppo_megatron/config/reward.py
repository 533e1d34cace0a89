"""The section `reward`: what values a response."""

from __future__ import annotations

from pydantic import Field, JsonValue

from .section import CountFromZero, Float, Processes, Seconds, Section


class RewardTerm(Section):
    """One of several rewards."""

    name: str = Field(description="as reward.name")
    weight: Float = Field(1.0, ge=-1e6, le=1e6, description="its factor in the sum")
    settings: dict[str, JsonValue] = Field(default_factory=dict, description="as reward.settings")
    sources: tuple[str, ...] = Field((), description="values rows of these data sources alone; empty = all rows")


class RewardConfig(Section):
    name: str = Field(
        "arithmetic",
        description="arithmetic | gsm8k | dapo | exact | http | math | multiple_choice | regex | "
        "package.module:function",
    )
    settings: dict[str, JsonValue] = Field(
        default_factory=dict, description="arguments of the grader, class or function, see docs/rewards.md"
    )
    terms: tuple[RewardTerm, ...] = Field(
        (), description="several rewards, in place of name: a row's reward is the weighted sum of those for its source"
    )
    timeout_s: Seconds = Field(10.0, description="a verifier slower than this scores the sample as failed")
    workers: Processes = Field(2, description="verifier processes")
    overlong_buffer: CountFromZero = Field(
        0,
        description="tokens before rollout.max_response_tokens over which a reward falls by up to 1 (DAPO's soft "
        "overlong penalty, added when training, not in the bank); 0 = off",
    )

    @property
    def all_terms(self) -> tuple[RewardTerm, ...]:
        return self.terms or (RewardTerm(name=self.name, settings=self.settings),)
