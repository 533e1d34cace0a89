"""Reward functions as users of verl and TRL write them, and one that mixes terms; unmodified by dotted path."""

import asyncio
import os
import re
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's custom reward function."""
    right = solution_str.strip() == ground_truth
    bonus = extra_info.get("bonus", 0.0)
    return {"score": float(right) + bonus + (data_source == "sums"), "acc": right}


def per_dataset_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """Has the signature of verl's gsm8k.compute_score."""
    return score if solution_str == ground_truth else format_score


async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


def format_reward(completions, **kwargs):
    """TRL's first example, for conversations."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content) else 0.0 for content in contents]


def length_reward(prompts, completions, answer, **kwargs):
    return [len(p) + len(c) / 10 + len(a) for p, c, a in zip(prompts, completions, answer, strict=True)]


def math_only(prompts, completions, task, **kwargs):
    return [1.0 if t == "math" else None for t in task]


async def async_reward(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def logging_reward(completions, log_extra, log_metric, trainer_state=None, **kwargs):
    log_extra("length", [len(completion) for completion in completions])
    log_metric(name="share", value=0.5)
    return [0.5] * len(completions)


def wrong_count(prompts, completions, **kwargs):
    return [1.0, 2.0]


def half(prompt, response_text):
    return 0.5


def scaled(prompt, response_text, factor):
    return factor * len(response_text)


class ReadsAnswers:
    def __call__(self, prompt, response_text):
        return 0.0

    def check_answer(self, answer):
        match answer:
            case "hang":
                time.sleep(1000)
            case "exit":
                os._exit(3)
            case "raise":
                raise KeyboardInterrupt
