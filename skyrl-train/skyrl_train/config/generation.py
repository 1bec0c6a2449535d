"""Settings of how answers are made: engines, sampling, turns."""

from dataclasses import dataclass, field
from typing import Any, Literal

from skyrl_train.config.base import BaseConfig
from skyrl_train.config.typed import reference

Device = Literal["cpu", "cuda"]


@dataclass(kw_only=True)
class SamplingParams(BaseConfig):
    """How tokens are drawn from the model."""

    max_generate_length: int = 1024
    """The most new tokens a turn."""

    temperature: float = 1.0
    """Divides the logits; log-probs are those of the divided ones. 0 takes the likeliest token."""

    top_p: float = 1.0
    """Draw from the smallest set of tokens with this much probability. 1: all."""

    top_k: int = -1
    """Draw from this many likeliest tokens. -1: all."""

    min_p: float = 0.0
    """Draw from tokens with at least this share of the likeliest one's probability."""

    repetition_penalty: float = 1.0
    """Above 1, tokens that have appeared become less likely (https://arxiv.org/abs/1909.05858)."""

    logprobs: int | None = 0
    """0: keep the log-prob of every token drawn. null: keep none."""

    stop: list[str] | None = None
    """Texts that end a turn. They stay in the answer."""

    additional_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keywords of the engine's sampling parameters, such as `stop_token_ids` or `min_tokens`."""


def _eval_sampling_params() -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_generate_length=reference("${generator.sampling_params.max_generate_length}")
    )


@dataclass(kw_only=True)
class ChatTemplateConfig(BaseConfig):
    """The template that turns messages into text, where the tokenizer's own should not be used."""

    source: Literal["name", "file"] = "name"
    """Whether `name_or_path` is the name of a template of ours or the path of a Jinja file."""

    name_or_path: str | None = None
    """`qwen3_with_thinking`, `qwen3_without_thinking`, or a path. null: the tokenizer's own template."""


@dataclass(kw_only=True)
class GeneratorConfig(BaseConfig):
    """How answers are made: engines, sampling, turns."""

    backend: Literal["auto", "native"] = "auto"
    """Rollout engine. `native` runs transformers models in our own loop, on CPU and CUDA; `auto`: the best there is."""

    model_name: str = reference("${trainer.policy.model.path}")
    """The engines' model."""

    model_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The engines' number format; weights are cast to it on their way."""

    num_inference_engines: int = 1
    """Engines. With `trainer.placement.colocate_all` on GPUs: one a policy worker."""

    max_num_seqs: int = 1024
    """The most sequences that one engine works on at a time; more wait."""

    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keywords of the engine's constructor. Add with `+generator.engine_init_kwargs.name=value`."""

    weight_sync_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries weights from the trainer to the engines. `auto`: nccl on cuda, gloo on cpu."""

    weight_transfer_threshold_cuda_ipc_GB: float = 1.0
    """Weights travel in pieces of about this many GB (1e9 bytes); a larger tensor travels alone."""

    n_samples_per_prompt: int = 5
    """Answers to each training prompt: the group that GRPO compares."""

    eval_n_samples_per_prompt: int = 1
    """Answers to each evaluation prompt."""

    seed: int = reference("${trainer.seed}")
    """Seeds sampling."""

    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    eval_sampling_params: SamplingParams = field(default_factory=_eval_sampling_params)

    max_input_length: int = reference("${trainer.max_prompt_length}")
    """The most tokens that an engine is given at any turn; a longer conversation ends with stop reason `length`."""

    max_turns: int = 1
    """The most turns of a conversation. Environments get it too."""

    use_conversation_multi_turn: bool = True
    """Every turn is a message of its own. False: model and environment write one growing assistant message."""

    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Where a turn ended with a stop text, put the end-of-sequence token the chat template expects after it. That token
    is not trained on."""

    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""

    step_wise_trajectories: bool = False
    """Every turn of a conversation is a training sample of its own, with the whole conversation before it as prompt."""

    merge_stepwise_output: bool = False
    """With `step_wise_trajectories`: a turn whose prompt begins with the tokens of the turn before is joined to it, so
    that the same tokens are not computed twice."""

    zero_reward_on_non_stop: bool = False
    """Reward 0 for answers that did not end with stop reason `stop`."""

    apply_overlong_filtering: bool = False
    """Do not train on answers that were cut off by a length limit."""

    max_rollout_retries: int = 2
    """How often a rollout is tried again after an infrastructure failure, before it is left out of the batch."""

    request_timeout_seconds: float = 3600.0
    """The longest that one request to an engine may take, waiting included."""

    def resolved_backend(self) -> Literal["native"]:
        """`backend` with `auto` answered."""
        return "native"

    def resolved_weight_sync_backend(self, device: Device) -> Literal["nccl", "gloo"]:
        """`weight_sync_backend` with `auto` answered for models on `device`."""
        if self.weight_sync_backend != "auto":
            return self.weight_sync_backend
        return "nccl" if device == "cuda" else "gloo"
