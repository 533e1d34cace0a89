"""Defines the sections `data`, `reward`, `environment` and `eval`: prompts, and the grading of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from .section import Count, CountFromZero, FilePath, Float, Host, Processes, Seconds, Section, setting

Weight = Annotated[Float, Field(gt=0, le=1e6)]


class DataFile(Section):
    """Names another file with training prompts."""

    path: FilePath = Field(description="as data.train")
    weight: Weight = setting(1.0, "prompts of this file for each one of data.train")


class DataConfig(Section):
    train: FilePath = Field(description="JSONL, parquet or a Hugging Face dataset directory, one prompt a row")
    eval: FilePath | None = setting(None, "held-out prompts, as data.train")
    more: tuple[DataFile, ...] = setting((), "more files of training prompts, mixed in by their weights")
    prompt_column: str = setting("prompt", "text or messages; a.b is the field b of column a")
    answer_column: str = setting("answer", "right answer for the grader, e.g. reward_model.ground_truth")
    source_column: str = setting("data_source", "the row's data source, for reward.terms; may be absent")
    chat_template: bool = setting(False, "wrap the prompt as a user turn with the tokenizer's chat template")
    prompt_template: str = setting("{prompt}", "text around the prompt; {prompt} is replaced")
    shuffle: bool = setting(True, "draw a new order of the prompts for each epoch, from run.seed")
    max_prompt_tokens: Count = setting(1024, "longest prompt; with the longest response at most engine.max_model_len")
    overlong: Literal["refuse", "drop", "truncate"] = setting(
        "refuse",
        "longer prompts: refuse = an error before the start, drop = leave them out and count them, truncate = keep "
        "their last max_prompt_tokens",
    )

    @property
    def train_files(self) -> tuple[tuple[Path, float], ...]:
        """Return every training prompt file and its weight."""
        return (self.train, 1.0), *((file.path, file.weight) for file in self.more)


class RewardTerm(Section):
    """Names one of several rewards."""

    name: str = Field(description="as reward.name")
    weight: Float = setting(1.0, "factor of the reward in the sum", ge=-1e6, le=1e6)
    settings: dict[str, JsonValue] = setting({}, "as reward.settings")
    sources: tuple[str, ...] = setting((), "only for rows of these data sources; empty = all rows")


class RewardConfig(Section):
    name: str = setting(
        "arithmetic",
        "arithmetic | gsm8k | dapo | exact | http | math | multiple_choice | regex | package.module:function",
    )
    settings: dict[str, JsonValue] = setting({}, "arguments of the grader, class or function, see docs/rewards.md")
    terms: tuple[RewardTerm, ...] = setting(
        (), "several rewards instead of name: weighted sum of those for a row's source"
    )
    timeout_s: Seconds = setting(10.0, "a sample whose verifier is slower counts as failed")
    workers: Processes = setting(2, "verifier processes")
    overlong_buffer: CountFromZero = setting(
        0,
        "tokens before rollout.max_response_tokens over which a reward falls by up to 1 (DAPO's soft overlong "
        "penalty, added in training, not in the bank); 0 = off",
    )

    @property
    def all_terms(self) -> tuple[RewardTerm, ...]:
        return self.terms or (RewardTerm(name=self.name, settings=self.settings),)


class EnvironmentConfig(Section):
    name: str | None = setting(None, "package.module:class of an environment; default: a response is one turn")
    agent: str | None = setting(
        None,
        "package.module:function(url, api_key, task) -> reward, instead of an environment: it requests turns over "
        "HTTP, like a client of OpenAI or Anthropic",
    )
    host: Host = setting("127.0.0.1", "address of this machine at which agents reach the policy")
    settings: dict[str, JsonValue] = setting({}, "arguments of the class, or further ones of the agent")
    max_turns: Count = setting(8, "turns of the policy; a longer trajectory ends there (max_turns)")
    max_turn_tokens: Count | None = setting(None, "limit of one turn; default: the rest of rollout.max_response_tokens")
    timeout_s: Seconds = setting(
        60.0, "a longer call of an environment, or a longer run of an agent, fails its trajectory"
    )
    trajectory_timeout_s: Seconds | None = setting(
        None, "a longer trajectory, including sampling, fails; default: only the limits of its turns"
    )
    workers: Processes = setting(32, "concurrent trajectories, each in its own process")

    @property
    def source(self) -> str | None:
        """Return the name of the class or function to import. With None a response is one turn."""
        return self.name or self.agent

    @property
    def setting(self) -> str:
        """Return the setting that names the class or function."""
        return "environment.name" if self.agent is None else "environment.agent"

    @property
    def described(self) -> str:
        return f"{self.setting} = {self.source}"


HELDOUT = "heldout"  # name of the data.eval set
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class EvalSet(Section):
    """Names held-out prompts, with the settings for answering and grading them."""

    path: FilePath = Field(description="as data.train; columns and longest prompt are those of `data`")
    prompt_template: str | None = setting(None, "text around the prompt; default: data.prompt_template")
    n: Count = setting(1, "answers to each prompt: the n of avg@n, pass@k and maj@n", le=2**16)
    temperature: Float = setting(0.0, "0 = greedy, for n = 1", ge=0, le=100)
    top_p: Float = setting(1.0, "may be below 1, since nothing trains on these answers", gt=0, le=1)
    max_response_tokens: Count | None = setting(
        None, "longest answer; default: eval.max_response_tokens, or rollout.max_response_tokens"
    )
    reward: RewardConfig | None = setting(None, "grader with the fields of the section `reward`, which is the default")
    pass_reward: Float = setting(1.0, "smallest reward of a right answer", ge=-1e6, le=1e6)


class EvalConfig(Section):
    every: CountFromZero = setting(0, "steps between evaluations; 0 = only before and after")
    max_response_tokens: Count | None = setting(None, "longest answer; default: rollout.max_response_tokens")
    pass_reward: Float = setting(1.0, "data.eval: smallest reward of a right answer", ge=-1e6, le=1e6)
    sets: dict[SetName, EvalSet] = setting({}, "named sets, in addition to data.eval, which is answered once, greedily")
