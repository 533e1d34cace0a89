"""The section `eval`: on what, how and how often the policy is evaluated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .reward import RewardConfig
from .section import Count, CountFromZero, FilePath, Float, Section

HELDOUT = "heldout"  # the set of data.eval
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class EvalSet(Section):
    """Prompts that are not trained on, and how they are answered and graded."""

    path: FilePath = Field(description="as data.train; columns and longest prompt are those of `data`")
    prompt_template: str | None = Field(None, description="text around the prompt; default: data.prompt_template")
    n: Count = Field(1, le=2**16, description="answers to each prompt: the n of avg@n, pass@k and maj@n")
    temperature: Float = Field(0.0, ge=0, le=100, description="0 = greedy, for n = 1")
    top_p: Float = Field(1.0, gt=0, le=1, description="may be below 1: nothing is trained from these answers")
    max_response_tokens: Count | None = Field(
        None, description="default: eval.max_response_tokens, or rollout.max_response_tokens"
    )
    reward: RewardConfig | None = Field(None, description="the grader, as the section `reward`, which is the default")
    pass_reward: Float = Field(1.0, ge=-1e6, le=1e6, description="an answer is right with at least this reward")


class EvalConfig(Section):
    every: CountFromZero = Field(0, description="steps between evaluations; 0 = only before and after")
    max_response_tokens: Count | None = Field(None, description="default: rollout.max_response_tokens")
    pass_reward: Float = Field(1.0, ge=-1e6, le=1e6, description="data.eval: right with at least this reward")
    sets: dict[SetName, EvalSet] = Field(
        default_factory=dict, description="named sets, besides data.eval, which is answered once, greedily"
    )
