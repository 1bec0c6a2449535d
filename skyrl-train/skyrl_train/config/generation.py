"""Settings of how answers are made: engines, sampling, turns."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from skyrl_train.config.base import BaseConfig
from skyrl_train.config.engine_kinds import automatic_backend, backend_choices
from skyrl_train.config.typed import Choices, reference

Device = Literal["cpu", "cuda"]


@dataclass(kw_only=True)
class SamplingParams(BaseConfig):
    """Sampling of tokens from the model."""

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
    """Generation of answers: engines, sampling, turns."""

    task: str | None = None
    """A task file of skyrl-agent: its agent makes the trajectories, in place of `environment.env_class`. Turns, tools,
    lengths and chat template are then the file's, and a trajectory may have several rows (see
    `generator.step_wise_trajectories`)."""

    backend: Annotated[str, Choices(backend_choices)] = "auto"
    """Rollout engine. `native` runs transformers models in our own loop, on CPU and CUDA; `vllm` and `sglang` are
    extras. `auto`: vllm on CUDA if it is installed, else native; for servers started elsewhere: what they say they are.
    """

    run_engines_locally: bool = True
    """Start engines in this run. False: use the servers of `generator.remote_inference_engine_urls`."""

    remote_inference_engine_urls: list[str] = field(default_factory=lambda: ["127.0.0.1:8001"])
    """`host:port` of each server, with `generator.run_engines_locally=false`. `docs/engines.md` tells how to start
    them."""

    remote_inference_engine_api_key_file: str | None = None
    """A file whose one line is the key of these servers, sent with every request. null: the environment variable
    `SKYRL_ENGINE_API_KEY`, if it is set. The key itself stands in no setting, so no log shows it."""

    model_name: str = reference("${trainer.policy.model.path}")
    """The engines' model."""

    model_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The engines' number format; weights are cast to it on their way."""

    num_inference_engines: int = 1
    """Engines. With `trainer.placement.colocate_all` on GPUs: one a policy worker."""

    inference_engine_tensor_parallel_size: int = 1
    """GPUs (on a CPU: processes) that share every layer of an engine. Must divide the model's attention heads."""

    inference_engine_pipeline_parallel_size: int = 1
    """Stages of layers of an engine, each on GPUs of its own."""

    inference_engine_data_parallel_size: int = 1
    """Copies of the model inside of one engine."""

    inference_engine_expert_parallel_size: int = 1
    """Above 1, the experts of a mixture are divided over this many GPUs: tensor- times data-parallel size."""

    max_num_seqs: int = 1024
    """The most sequences that one engine works on at a time; more wait."""

    max_num_batched_tokens: int = 8192
    """The most tokens of one engine step (vllm, sglang)."""

    gpu_memory_utilization: float = 0.8
    """The share of a GPU's memory that an engine may take (vllm, sglang)."""

    enforce_eager: bool = True
    """Do not compile the model nor record CUDA graphs: slower tokens, a faster start (vllm, sglang)."""

    enable_prefix_caching: bool = True
    """Keep keys and values of prompts for later requests that begin alike, until the weights change (vllm, sglang)."""

    enable_chunked_prefill: bool = True
    """Compute long prompts in parts, between steps of other requests (vllm)."""

    fully_sharded_loras: bool = False
    """Divide adapters as the layers are, instead of half of them (vllm, tensor parallel)."""

    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keywords of the engine's constructor. Add with `+generator.engine_init_kwargs.name=value`."""

    weight_sync_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """What carries weights from the trainer to the engines. `auto`: nccl on cuda, gloo on cpu."""

    weight_transfer_threshold_cuda_ipc_GB: float = 1.0
    """Weights travel in buckets of about this many GB (1e9 bytes), the extra memory of a sync; a larger tensor travels
    alone."""

    weight_sync_strategy: Literal[
        "auto", "shared_memory", "cuda_ipc", "broadcast", "checkpoint", "adapter", "delta"
    ] = "auto"
    """How weights reach the engines. `auto`: through shared memory (CPU) or CUDA IPC where workers and engines share
    devices, by a broadcast otherwise, as files for servers started elsewhere. `adapter`: low-rank adapters alone, as
    files. `delta`: only what changed, compressed, on the way that `auto` would take."""

    weight_sync_directory: str = reference("${trainer.run_dir}/weight_sync")
    """Where `checkpoint` and `adapter` leave their files, seen under this name by the engines as well; `delta` keeps
    the last weights that it sent here."""

    weight_sync_verification: Literal["sampled", "full", "off"] = "sampled"
    """After each sync every engine reports a fingerprint of every tensor, which must be the trainer's, and each of its
    processes compares what its layers compute with. `sampled` reads a part of each larger tensor, another one at each
    sync; `full` reads every byte."""

    weight_sync_canary_interval: int = 1
    """At the first sync and every so many after it, the log-probs of a few fixed tokens under engine and trainer are
    compared. 1: at every sync. 0: never."""

    weight_sync_canary_tolerance: float | None = None
    """The largest mean difference of log-probs at the canary tokens. null: ten times what the first syncs left, within
    bounds of `generator.model_dtype`."""

    weight_sync_pause: Literal["keep", "wait", "abort"] = "keep"
    """What happens to running requests during a sync. `keep`: they stop where they are and go on under the new weights;
    `wait`: they end first; `abort`: they are taken back and go on as new requests."""

    max_requests_per_engine: int | None = 8192
    """The most requests that the client has under way on one engine; more wait in the client, in their order, where a
    pause reaches them and another engine may take them. null: no limit."""

    max_engine_restarts: int = 3
    """How often in a run engines that died or hang are started again, all together; one more ends the run."""

    engine_start_timeout_seconds: float = 600.0
    """The longest that an engine may take to start."""

    engine_control_timeout_seconds: float = 600.0
    """The longest that a pause, a wake-up or one bucket of weights may take."""

    engine_health_interval_seconds: float = 10.0
    """Seconds between two health checks of an engine. One that neither answers nor computes anything for three
    intervals counts as dead. 0: only failing requests tell."""

    enable_http_endpoint: bool = False
    """Serve the engines through an OpenAI-compatible HTTP endpoint while the run lasts."""

    http_endpoint_host: str = "127.0.0.1"
    """The address on which the endpoint listens."""

    http_endpoint_port: int = 8000
    """The port on which the endpoint listens. 0: any free one, which the log names."""

    http_endpoint_max_requests: int = 16384
    """The most answers that the endpoint has under way or waiting (each prompt and each of its `n` choices counts);
    further requests get status 429, and clients send them again."""

    served_model_name: str | None = None
    """The model's name for clients of the endpoint. null: `generator.model_name`."""

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
    """Do not train on answers that were cut off by a length limit. Their rewards stay in the group's mean."""

    overlong_filtering_by: Literal["stop_reason", "end_token"] = "stop_reason"
    """How `apply_overlong_filtering` knows such answers. `stop_reason`: the engine or the generator reached a limit;
    `end_token`: the last token is not the tokenizer's end-of-sequence token, so that answers which ended at another
    stop token or text are left out as well."""

    max_rollout_retries: int = 2
    """How often a rollout is tried again after an infrastructure failure, before it is left out of the batch."""

    request_timeout_seconds: float = 3600.0
    """The longest that one request to an engine may take, waiting included."""

    @property
    def has_rows_of_steps(self) -> bool:
        """Whether a row of the batch may be a part of a trajectory."""
        return self.step_wise_trajectories or self.task is not None

    @property
    def longest_context(self) -> int:
        """The most tokens of a sample: the longest input of a turn, and its answer."""
        return self.max_input_length + self.sampling_params.max_generate_length

    @property
    def engine_world_size(self) -> int:
        """Processes (GPUs) of one engine."""
        copies = self.inference_engine_tensor_parallel_size * self.inference_engine_data_parallel_size
        return copies * self.inference_engine_pipeline_parallel_size

    def resolved_backend(self, device: Device) -> str:
        """`backend` with `auto` answered for engines that this run starts on `device`."""
        return automatic_backend(device) if self.backend == "auto" else self.backend

    def resolved_weight_sync_backend(self, device: Device) -> Literal["nccl", "gloo"]:
        """`weight_sync_backend` with `auto` answered for models on `device`."""
        if self.weight_sync_backend != "auto":
            return self.weight_sync_backend
        return "nccl" if device == "cuda" else "gloo"
