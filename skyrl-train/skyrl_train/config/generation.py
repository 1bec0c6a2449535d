"""Settings of generation: engines, sampling, conversations."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from skyrl_train.config.base import BaseConfig
from skyrl_train.config.engine_kinds import get_backend_choices, select_automatic_backend
from skyrl_train.config.harness import HarnessConfig
from skyrl_train.config.typed import Choices, make_reference

Device = Literal["cpu", "cuda"]


@dataclass(kw_only=True)
class SamplingParams(BaseConfig):
    """Sampling of tokens from the policy."""

    max_generate_length: int = 1024
    """Maximum number of new tokens per turn."""

    temperature: float = 1.0
    """Sampling temperature: divides the logits; log-probs are computed after the division. 0: greedy decoding."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this total probability. 1: all tokens."""

    top_k: int = -1
    """Sample from this many most likely tokens. -1: all tokens."""

    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the probability of the most likely one."""

    repetition_penalty: float = 1.0
    """Penalty of tokens that have appeared before; above 1 they become less likely
    (https://arxiv.org/abs/1909.05858).
    """

    logprobs: int | None = 0
    """0: record the log-prob of every sampled token. null: record none."""

    stop: list[str] | None = None
    """Stop strings, which end a turn. They remain in the response."""

    additional_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's sampling parameters, such as `stop_token_ids` or `min_tokens`."""


def _build_eval_sampling_params() -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_generate_length=make_reference("${generator.sampling_params.max_generate_length}")
    )


@dataclass(kw_only=True)
class ChatTemplateConfig(BaseConfig):
    """Chat template that overrides the tokenizer's."""

    source: Literal["name", "file"] = "name"
    """Form of `name_or_path`: the name of a template shipped with this package, or the path of a Jinja file."""

    name_or_path: str | None = None
    """`qwen3_with_thinking`, `qwen3_without_thinking`, or a path. null: the tokenizer's template."""


@dataclass(kw_only=True)
class GeneratorConfig(BaseConfig):
    """Generation of trajectories: engines, sampling, conversations."""

    task: str | None = None
    """Path of a skyrl-agent task file, whose agent generates the trajectories instead of `environment.env_class`, with
    the file's turns, tools, lengths and chat template."""

    harness: HarnessConfig = field(default_factory=HarnessConfig)

    backend: Annotated[str, Choices(get_backend_choices)] = "auto"
    """Rollout engine. `native`: transformers models in this package's own generation loop, on CPU and CUDA. `vllm`,
    `sglang`: optional extras. `auto`: vllm on CUDA if it is installed, else native; servers started elsewhere are asked
    for their kind."""

    run_engines_locally: bool = True
    """Start the engines as part of this run. False: use the servers of `generator.remote_inference_engine_urls`."""

    remote_inference_engine_urls: list[str] = field(default_factory=lambda: ["127.0.0.1:8001"])
    """`host:port` of each server, with `generator.run_engines_locally=false`. `docs/engines.md` describes how to start
    them."""

    remote_inference_engine_api_key_file: str | None = None
    """File whose only line is the API key of these servers, sent with every request. null: the environment variable
    `SKYRL_ENGINE_API_KEY`, if set."""

    model_name: str = make_reference("${trainer.policy.model.path}")
    """Model that the engines load."""

    model_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of the engines' weights; synced weights are cast to it."""

    num_inference_engines: int = 1
    """Number of engines. With `trainer.placement.colocate_all` on GPUs: one per policy worker."""

    inference_engine_tensor_parallel_size: int = 1
    """GPUs (on a CPU: processes) that share every layer of an engine. Must divide the number of attention heads."""

    inference_engine_pipeline_parallel_size: int = 1
    """Pipeline stages of an engine, each on separate GPUs."""

    inference_engine_data_parallel_size: int = 1
    """Replicas of the model within one engine."""

    inference_engine_expert_parallel_size: int = 1
    """GPUs over which the experts of a mixture are divided, if above 1: tensor-parallel size times data-parallel
    size.
    """

    max_num_seqs: int = 1024
    """Maximum number of sequences that one engine processes concurrently; further ones wait."""

    max_num_batched_tokens: int = 8192
    """Maximum number of tokens per engine step (vllm, sglang)."""

    gpu_memory_utilization: float = 0.8
    """Fraction of a GPU's memory that an engine may use (vllm, sglang)."""

    enforce_eager: bool | None = None
    """Run the model without CUDA graphs (vllm: and compilation): slower generation, faster start, no memory for
    graphs. null: graphs on GPUs, none on a CPU."""

    enable_prefix_caching: bool = True
    """Cache keys and values of prompts and responses for later requests with the same prefix, until the weights
    change."""

    enable_chunked_prefill: bool = True
    """Process long prompts in chunks, between decoding steps of other requests (vllm, sglang; native, with
    `generator.enable_prefix_caching`)."""

    fully_sharded_loras: bool = False
    """Shard all adapter matrices like their layers, instead of half of them (vllm with tensor parallelism)."""

    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's constructor. Add with `+generator.engine_init_kwargs.name=value`."""

    weight_sync_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend that broadcasts weights from the trainer to the engines. `auto`: nccl on cuda, gloo on
    cpu.
    """

    weight_transfer_threshold_cuda_ipc_GB: float = 1.0
    """Limit of the extra memory of a weight sync, in GB (1e9 bytes). Buckets have at most a quarter of it and 64 MiB
    (files: all of it)."""

    weight_sync_strategy: Literal[
        "auto", "shared_memory", "cuda_ipc", "broadcast", "checkpoint", "adapter", "delta"
    ] = "auto"
    """Transport of weights to the engines. `shared_memory` and `cuda_ipc`: for workers and engines on the same devices.
    `broadcast`: over a process group. `checkpoint`: as files. `adapter`: low-rank adapters only, as files. `delta`:
    only values that changed, compressed, over the transport that `auto` would choose. `auto`: shared memory (CPU) or
    CUDA IPC if workers and engines share devices, files for servers started elsewhere, else broadcast."""

    weight_sync_directory: str = make_reference("${trainer.run_dir}/weight_sync")
    """Folder for the files of `checkpoint` and `adapter`, which engines must see under the same path; `delta` stores
    the last weights it sent here."""

    weight_sync_verification: Literal["sampled", "full", "off"] = "sampled"
    """Verification after each sync of what every engine received and computes with. `sampled` reads a part of each
    larger tensor, a different one at each sync; `full` reads every byte."""

    weight_sync_canary_interval: int = 1
    """Weight syncs between comparisons of engine and trainer log-probs on a few fixed tokens; the first sync is always
    compared. 1: at every sync. 0: never."""

    weight_sync_canary_tolerance: float | None = None
    """Maximum mean difference of log-probs [nats] on the canary tokens. null: ten times the difference after the first
    syncs, within bounds that depend on `generator.model_dtype`."""

    weight_sync_pause: Literal["keep", "wait", "abort"] = "keep"
    """Handling of running requests during a weight sync. `keep`: they pause and continue under the new weights. `wait`:
    the sync waits until they have finished. `abort`: they are cancelled and continued as new requests from their tokens
    so far."""

    max_requests_per_engine: int | None = 8192
    """Maximum number of requests in flight on one engine; further ones queue in the client in order. null: no limit."""

    max_engine_restarts: int = 3
    """Maximum number of restarts of crashed or hanging engines, over all engines of a run; one more failure ends the
    run."""

    engine_start_timeout_seconds: float = 600.0
    """Timeout of an engine's start, in seconds."""

    engine_control_timeout_seconds: float = 600.0
    """Timeout of a pause, a wake-up or the transfer of one bucket of weights, in seconds."""

    engine_health_interval_seconds: float = 10.0
    """Interval of health checks of an engine, in seconds. An engine that neither responds nor makes progress for three
    intervals is considered crashed. 0: no checks."""

    enable_http_endpoint: bool = False
    """Serve the engines through an OpenAI-compatible HTTP endpoint during the run."""

    http_endpoint_host: str = "127.0.0.1"
    """Address that the endpoint listens on."""

    http_endpoint_port: int = 8000
    """Port that the endpoint listens on. 0: any free port, which is logged."""

    http_endpoint_max_requests: int = 16384
    """Maximum number of completions that the endpoint processes or queues (each of a prompt's `n` choices counts);
    further requests get status 429."""

    served_model_name: str | None = None
    """Name of the model for clients of the endpoint. null: `generator.model_name`."""

    n_samples_per_prompt: int = 5
    """Samples per training prompt: the group size of GRPO."""

    eval_n_samples_per_prompt: int = 1
    """Samples per evaluation prompt."""

    seed: int = make_reference("${trainer.seed}")
    """Random seed of sampling."""

    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    eval_sampling_params: SamplingParams = field(default_factory=_build_eval_sampling_params)

    max_input_length: int = make_reference("${trainer.max_prompt_length}")
    """Maximum number of input tokens of an engine at any turn; a longer conversation ends with stop reason `length`."""

    max_turns: int = 1
    """Maximum number of turns of a conversation. Also passed to environments."""

    use_conversation_multi_turn: bool = True
    """Add every turn as a separate message. False: model and environment extend one assistant message."""

    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Append the chat template's end-of-turn text to a turn that ended with a stop string. It is masked out of the
    loss."""

    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""

    step_wise_trajectories: bool = False
    """Make every turn of a conversation a separate training sample, with the conversation before it as its prompt."""

    merge_stepwise_output: bool = False
    """Merge a turn into the previous one if its prompt begins with that turn's tokens, so that shared tokens are
    computed once (with `step_wise_trajectories`)."""

    zero_reward_on_non_stop: bool = False
    """Set the reward to 0 for responses that did not end with stop reason `stop`."""

    apply_overlong_filtering: bool = False
    """Mask responses that were truncated by a length limit out of the loss. Their rewards still count in the group's
    baseline."""

    overlong_filtering_by: Literal["stop_reason", "end_token"] = "stop_reason"
    """Criterion of `apply_overlong_filtering`. `stop_reason`: engine or generator reached a limit. `end_token`: the
    last token does not end a turn, which also excludes responses that ended at a stop string."""

    max_rollout_retries: int = 2
    """Maximum number of retries of a rollout after an infrastructure failure, before it is excluded from the batch."""

    request_timeout_seconds: float = 3600.0
    """Timeout of one request to an engine, in seconds, waiting included."""

    @property
    def has_rows_of_steps(self) -> bool:
        """Whether a batch row may be a part of a trajectory."""
        return self.step_wise_trajectories or not self.uses_environments

    @property
    def uses_environments(self) -> bool:
        """Whether trajectories are generated with `environment.env_class`, not by an agent (`task`, `harness`)."""
        return self.task is None and not self.harness.is_on

    @property
    def longest_context(self) -> int:
        """Maximum number of tokens of a sample: the longest input of a turn, and its response."""
        return self.max_input_length + self.sampling_params.max_generate_length

    @property
    def engine_world_size(self) -> int:
        """Number of processes (GPUs) of one engine."""
        copies = self.inference_engine_tensor_parallel_size * self.inference_engine_data_parallel_size
        return copies * self.inference_engine_pipeline_parallel_size

    def resolve_backend(self, device: Device) -> str:
        """Return `backend`, with `auto` resolved for engines that this run starts on `device`."""
        return select_automatic_backend(device) if self.backend == "auto" else self.backend

    @property
    def syncs_all_weights(self) -> bool:
        """True if every weight sync sends all weights, so that engines may free theirs before it."""
        return self.weight_sync_strategy not in ("adapter", "delta")

    def resolve_enforce_eager(self, device: Device) -> bool:
        """Return `enforce_eager`, with None resolved for engines on `device`."""
        return device == "cpu" if self.enforce_eager is None else self.enforce_eager

    def resolve_weight_sync_backend(self, device: Device) -> Literal["nccl", "gloo"]:
        """Return `weight_sync_backend`, with `auto` resolved for models on `device`."""
        if self.weight_sync_backend != "auto":
            return self.weight_sync_backend
        return "nccl" if device == "cuda" else "gloo"
