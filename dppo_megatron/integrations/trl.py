"""Train with TRL 1.16's GRPOTrainer and an objective as the loss. docs/integrations.md."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from dppo_megatron.errors import shown
from dppo_megatron.objectives import (
    ObjectiveError,
    ObjectiveOutput,
    ObjectiveProtocol,
    TopKLogprobs,
    flatten_metrics,
    reduce_metrics,
    unflatten_metrics,
)
from dppo_megatron.vocab_parallel import token_statistics

from .padded import on_rows, refuse_unfit, resolve, unfit

# GRPOConfig settings with an effect here. All others belong to TRL's loss, which the objective replaces.
_EFFECTIVE = (
    "transformers_continuous_batching_config", "use_transformers_continuous_batching", "vllm_structured_outputs_regex",
    "vllm_importance_sampling_correction", "multi_objective_aggregation", "max_tool_calling_iterations", "temperature",
    "vllm_gpu_memory_utilization", "mask_truncated_completions", "ds3_gather_for_generation", "vllm_enable_sleep_mode",
    "vllm_tensor_parallel_size", "log_completions_hub_repo", "num_completions_to_print", "use_transformers_paged",
    "generation_batch_size", "vllm_max_model_length", "max_completion_length", "ref_model_mixup_alpha", "scale_rewards",
    "num_generations_eval", "steps_per_generation", "vllm_server_base_url", "chat_template_kwargs", "model_init_kwargs",
    "router_aux_loss_coef", "ref_model_sync_steps", "cast_lm_head_to_fp32", "cache_implementation", "generation_kwargs",
    "vllm_server_timeout", "log_unique_prompts", "pad_to_multiple_of", "repetition_penalty", "trust_remote_code",
    "vllm_server_port", "vllm_server_host", "vllm_model_impl", "disable_dropout", "vllm_group_port", "shuffle_dataset",
    "log_completions", "num_generations", "num_iterations", "reward_weights", "log_multimodal", "sync_ref_model",
    "loss_type", "vllm_mode", "use_vllm", "min_p", "top_p", "top_k", "beta",
)  # fmt: skip
# Generation settings, and (in _NEUTRAL) values of other settings, that do not affect a sampled token's distribution.
_FREE = (
    "max_length", "max_new_tokens", "max_tokens", "max_time", "stop", "stop_token_ids", "include_stop_str_in_output",
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "use_cache", "disable_compile", "compile_config",
    "output_attentions", "output_hidden_states", "transformers_version", "_from_model_config", "early_stopping",
    "length_penalty", "num_assistant_tokens", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,), "num_beams": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0, None), "typical_p": (1,),
    "repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "guidance_scale": (1, None),
    "min_tokens": (0,), "min_new_tokens": (0, None), "renormalize_logits": (True, False, None), "logprobs": (0,),
    "cache_implementation": (None, "dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "hybrid"),
}  # fmt: skip
# Model inputs in addition to text. Lists are made only for text.
_NOT_TEXT = ("pixel_values", "token_type_ids", "mm_token_type_ids")


class ObjectiveTrainer(GRPOTrainer):
    """Trains GRPOTrainer with an objective as the loss.

    objective: a preset, with axes in `settings`, or any other objective.
    topk: ids per token in the lists, for methods that use lists. An additional forward pass per generated batch
        computes them from the sampling weights. There are no lists with vLLM or a `rollout_func`, because TRL keeps
        only the sampled token.

    mu is the log-prob that vLLM or a `rollout_func` returned, otherwise the sampling weights' log-prob. `loss_type`
    defines only how token losses are summed: `dapo`, `bnpo`, `grpo`, `dr_grpo` or `luspo`, or another name with such a
    sum. `reference_kl` uses TRL's reference policy: set `beta` to `reference_kl_coefficient`.

    Metrics are logged as `objective/NAME`, averaged over the micro-batches that TRL logs together.
    Raises ObjectiveError for an objective that cannot be TRL's loss, and for GRPOConfig settings that would have no
    effect or a wrong effect.
    """

    def __init__(
        self,
        *args: Any,
        objective: str | ObjectiveProtocol,
        settings: dict[str, Any] | None = None,
        topk: int = 20,
        **kwargs: Any,
    ):
        self.objective = resolve(objective, settings or {})
        self.topk = topk
        for argument in (*args, *kwargs.values()):
            _check_generation_kwargs(getattr(argument, "generation_kwargs", None))
        super().__init__(*args, **kwargs)
        own_sampler = not self.use_vllm and self.rollout_func is None
        refuse_unfit(self.objective, "TRL", unfit(self.objective, topk=own_sampler, old=True, terms=True))
        problems = _setting_problems(self.objective, self.args, aux_loss=self.aux_loss_enabled)
        if problems := problems + self._sampling_problems() + _dropout_problems(self.model):
            raise ObjectiveError("; ".join(problems))

    def _sampling_problems(self) -> list[str]:
        """List settings that make the distribution of sampled tokens differ from the scored distribution."""
        args, kwargs = self.args, self.args.generation_kwargs or {}
        setting_names = (
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "cache_implementation",
            "vllm_structured_outputs_regex",
        )
        settings = {name: getattr(args, name) for name in setting_names} | kwargs
        neutral = _NEUTRAL | {"temperature": (self.temperature,)}
        if not self.use_vllm:  # `generate` adds the settings in the model's generation_config.json
            config, default = self.model._prepare_generation_config(self.generation_config)[0], GenerationConfig()
            settings |= {name: value for name, value in config.to_dict().items() if hasattr(default, name)}
            defaults = {name: (value, None) for name, value in default._get_default_generation_params().items()}
            ends = self.eos_token_ids
            neutral = defaults | neutral | {"eos_token_id": (ends, *ends) if len(ends) == 1 else (ends,), "top_k": (0,)}
            neutral["suppress_tokens"] = (None, [getattr(self.model.config, "image_token_id", None)])  # set by TRL
        wrong_settings, remedies = [], []
        for name, value in settings.items():
            if name not in _FREE and value not in (values := neutral.get(name, (None, False))):
                place = "generation_kwargs: " if name in kwargs else "generation_config of the model: "
                wrong_settings.append(f"{'' if name not in kwargs and hasattr(args, name) else place}{name} = {value}")
                remedies.append(f"{name} to {values[0]}")
        reason = "tokens would be sampled from another distribution than the scored one, and every ratio would be off"
        return [f"{', '.join(wrong_settings)}: {reason}; set {', '.join(remedies)}"] if wrong_settings else []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.objective.needs_topk:
            if any(name in output for name in _NOT_TEXT):
                raise ObjectiveError(
                    f"objective {self.objective.name} reads lists of likely tokens, which this trainer makes for text "
                    "only, not for images: use a method without lists, such as dppo_binary_tv"
                )
            output |= self._lists(output)
        return output

    @torch.no_grad()
    def _lists(self, output: dict[str, Any]) -> dict[str, Tensor]:
        """Return the most likely ids and their ln mu, [B, C, K]. The model still has the sampling weights here."""
        ids, logprobs = [], []
        size = self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        for rows in torch.arange(len(output["completion_ids"])).split(size):
            part = {name: output[name][rows] for name in _TOKENS}
            ln_mu = (self._logits(self.model, part).float() / self.temperature).log_softmax(-1)
            logprob, topk_ids = ln_mu.topk(min(self.topk, ln_mu.shape[-1]))
            ids.append(topk_ids)
            logprobs.append(logprob)
        return {"topk_ids": torch.cat(ids), "topk_logps": torch.cat(logprobs)}

    def _logits(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the logits [B, C, V] for the completion tokens, before the temperature."""
        length = inputs["completion_ids"].shape[1]
        ids, mask = _whole(inputs)
        with self.accelerator.autocast():
            logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=length + 1, use_cache=False).logits
        return logits[:, -length - 1 : -1]

    def _policy(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, TopKLogprobs | None]:
        """Return (log-prob [B, C], entropy [B, C], lists [B C, K] or None) for the policy in training."""
        if not self.objective.needs_topk:
            extras = {name: inputs.get(name) for name in _FORWARD}
            length = inputs["completion_ids"].shape[1]
            logprob, entropy, _ = self._get_per_token_logps_and_entropies(
                model, *_whole(inputs), length, compute_entropy=True, **extras
            )
            return logprob, entropy, None
        targets = inputs["completion_ids"]
        logits = self._logits(model, inputs)
        ids = inputs["topk_ids"].flatten(0, 1)
        statistics = token_statistics(
            logits.flatten(0, 1),
            targets.flatten(),
            topk_ids=ids,
            temperature=self.temperature,
            entropy="differentiable" if self.objective.needs_entropy else "metric",
        )
        ln_mu = inputs["topk_logps"].flatten(0, 1)
        lists = TopKLogprobs(
            ids=ids,
            rollout_logprob=ln_mu,
            logprob=statistics.topk_logprob,
            other_logprob=statistics.other_logprob,
            target_ids=targets.flatten(),
            vocab_size=logits.shape[-1],
            old_logprob=ln_mu,  # the same weights sampled
        )
        return statistics.logprob.view_as(targets), statistics.entropy.view_as(targets), lists

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        logprob, entropy, lists = self._policy(model, inputs)
        old = inputs.get("old_per_token_logps")
        old = logprob.detach() if old is None else old  # TRL omits old log-probs while the weights have not changed
        mu = inputs.get("sampling_per_token_logps")
        distinct = self.objective.needs_old or mu is not None
        mu = old if mu is None else mu
        advantages = inputs["advantages"]
        out = on_rows(
            self.objective,
            mask=(mask != 0) & ~mu.isnan(),  # vLLM can fail to score a token
            logprob=logprob,
            rollout_logprob=mu,
            old_logprob=old if distinct else None,
            reference_logprob=inputs.get("ref_per_token_logps"),
            advantage=advantages if advantages.dim() == 2 else advantages[:, None],
            entropy=entropy,
            topk=lists,
        )
        self._record(out)
        return (out.loss.view_as(logprob) * self._weights(mask, inputs)).sum()

    def _weights(self, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return [B, 1] or [1, 1]: a token's weight in this micro-batch, so that losses sum as in TRL's loss type."""
        training = self.model.training
        accumulated = self.current_gradient_accumulation_steps if training else 1
        rows = mask.shape[0]
        whole = mask.new_ones((1, 1), dtype=torch.float32)
        if self.loss_type in ("dapo", "cispo", "vespo"):  # tokens in an update, on all ranks
            tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            share = accumulated / self.args.steps_per_generation if training else 1
            return whole / (tokens * share)
        if self.loss_type in ("grpo", "sapo"):
            return 1 / (mask.sum(dim=1, keepdim=True).clamp(min=1) * rows * accumulated)
        if self.loss_type == "bnpo":
            return whole / (mask.sum().clamp(min=1) * accumulated)
        horizon = self.max_completion_length if self.loss_type == "dr_grpo" else 1  # luspo: row sums
        return whole / (rows * horizon * accumulated)

    def _record(self, out: ObjectiveOutput) -> None:
        """Log the metrics. Collectives: a sum and a gather."""
        sums, maxima = flatten_metrics(out.metrics)
        sums = self.accelerator.reduce(sums, reduction="sum")
        maxima = self.accelerator.gather(maxima[None]).amax(dim=0)
        mode = "train" if self.model.training else "eval"
        for name, value in reduce_metrics(unflatten_metrics(out.metrics, sums, maxima)).items():
            self._metrics[mode][f"objective/{name}"].append(value)


_TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
_FORWARD = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def _whole(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (token ids [B, P + C], attention mask [B, P + C]) of prompt and completion together."""
    ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    return ids, mask


def _check_generation_kwargs(kwargs: Any) -> None:
    """Raise ObjectiveError for other types than dict, and for arrays, which no check can compare with a value."""
    if not isinstance(kwargs, dict | None):
        raise ObjectiveError(f"generation_kwargs = {shown(kwargs)}: is not a dictionary; name each setting")
    for name, value in (kwargs or {}).items():
        if _has_array(value):
            raise ObjectiveError(f"generation_kwargs: {name} = {shown(value)}: has an array; use numbers or lists")


def _has_array(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return bool(getattr(value, "shape", ())) or any(map(_has_array, parts))


def _dropout_problems(model: torch.nn.Module) -> list[str]:
    """Name the model's first active dropout: `p` in a PyTorch dropout layer, or any attribute `...dropout`."""
    layer = torch.nn.modules.dropout._DropoutNd
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            dropout = key.endswith("dropout") or (key == "p" and isinstance(module, layer))
            if dropout and isinstance(value, float) and value:
                reason = "its noise differs between sampling and scoring, and every ratio would be off"
                return [f"{name}.{key} = {value:g}: {reason}; set it to 0, or disable_dropout to True for a layer"]
    return []


def _setting_problems(objective: ObjectiveProtocol, args: GRPOConfig, *, aux_loss: bool) -> list[str]:
    default = {field.name: field.default for field in fields(GRPOConfig)}
    loss_settings = default.keys() - {field.name for field in fields(TrainingArguments)} - {*_EFFECTIVE}
    problems = [
        f"{name} = {getattr(args, name)}: the loss is objective {objective.name}, which has no such setting; remove it "
        "and set an axis of the objective in `settings`"
        for name in sorted(loss_settings | {"label_smoothing_factor", "neftune_noise_alpha"})
        if getattr(args, name) != default[name] and not (name == "epsilon_high" and args.epsilon_high == args.epsilon)
    ]
    if args.loss_type not in (sums := ("dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")):
        problems.append(f"loss_type = {args.loss_type}: is not known; use one of {', '.join(sums)}")
    expected_beta = objective.settings.reference_kl_coefficient if objective.needs_reference else 0.0
    if args.beta != expected_beta:
        problems.append(
            f"beta = {args.beta}: the objective computes the KL to the reference policy; set beta to its coefficient, "
            f"{expected_beta} (TRL loads a reference model only if beta is not 0)"
        )
    if aux_loss:
        problems.append("router_aux_loss_coef: the loss of the router is not part of the objective; set it to 0")
    return problems
