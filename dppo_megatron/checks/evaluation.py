"""Rules of `eval`: a name that no other set has, and answers that differ where several are sampled."""

from __future__ import annotations

from dppo_megatron.config import Config
from dppo_megatron.config.task import HELDOUT


def problems(config: Config) -> list[str]:
    out = []
    if config.eval.every and config.samples and not config.eval_sets:
        out.append(f"eval.every = {config.eval.every}: there is nothing to evaluate; set data.eval or eval.sets, or 0")
    if HELDOUT in config.eval.sets:
        out.append(f"eval.sets.{HELDOUT}: the name of the set in data.eval; choose another")
    for name, chosen in config.eval.sets.items():
        setting = f"eval.sets.{name}"
        if 0 < chosen.temperature < 0.01:
            out.append(
                f"{setting}.temperature = {chosen.temperature:g}: vLLM raises it to 0.01; set it to 0 (greedy) or to "
                "at least 0.01"
            )
        if chosen.temperature == 0 and chosen.n > 1:
            out.append(
                f"{setting}.n = {chosen.n}: with {setting}.temperature = 0 all answers to a prompt are the same; set "
                "n to 1 or a temperature"
            )
        if chosen.temperature == 0 and chosen.top_p < 1:
            out.append(
                f"{setting}.top_p = {chosen.top_p:g}: greedy answers do not depend on it; remove it or set a "
                "temperature"
            )
        if chosen.top_p < 1 and config.engine.kind == "sglang" and config.engine.seeded:
            out.append(
                f"{setting}.top_p = {chosen.top_p:g}: with it SGLang draws every sample of its batch in another way, "
                "those that are trained on too, and they would not follow from their seeds; set it to 1, or "
                "engine.seeded to false"
            )
        if chosen.reward is not None and chosen.reward.overlong_buffer:
            out.append(
                f"{setting}.reward.overlong_buffer = {chosen.reward.overlong_buffer}: it shapes rewards of training "
                "alone; remove it"
            )
    return out
