"""Rows for `generator`, and for `environment` without the sections of single environments."""

import sys
from dataclasses import field, make_dataclass
from types import ModuleType
from typing import Any

import pytest
from effects import All, Bench, Row, Settings, error, metrics, of_run, trajectories
from rows_trainer import EVALUATION, evaluations, pauses, quiet

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.endpoint import build_endpoint
from skyrl_train.entrypoints.engines import build_engine_factory, read_remote_api_key
from skyrl_train.generators import skyrl_gym_generator
from skyrl_train.inference_engines.engine_settings import EngineSettings
from skyrl_train.inference_engines.sglang.arguments import build_server_arguments
from skyrl_train.inference_engines.vllm.arguments import build_engine_arguments

TWO_TURNS = {"generator.max_turns": 2}
STEP_WISE = TWO_TURNS | {"generator.step_wise_trajectories": True}
STOP = {"generator.sampling_params.stop": ["a", "b", "c", "d", "e", "f", "g", "h"]}
FILTERING = {
    "generator.apply_overlong_filtering": True,
    "generator.append_eos_token_after_stop_str_in_multi_turn": False,
}
TEMPLATE = {
    "generator.chat_template.source": "file",
    "generator.chat_template.name_or_path": "{folder}/template.jinja",
    "generator.sampling_params.logprobs": None,
    "generator.eval_sampling_params.logprobs": None,
}
REMOTE = {
    "trainer.placement.colocate_all": False,
    "generator.backend": "vllm",
    "generator.run_engines_locally": False,
    "generator.remote_inference_engine_urls": ["127.0.0.1:1"],
}
TENSOR_PARALLEL = {"generator.inference_engine_tensor_parallel_size": 2}
APART = {"trainer.placement.colocate_all": False}
ADAPTERS = {"trainer.policy.model.lora.rank": 4, "generator.weight_sync_strategy": "adapter"}
ENDPOINT = {"generator.enable_http_endpoint": True, "generator.http_endpoint_port": 0}
EVALUATED = EVALUATION | {"generator.eval_sampling_params.temperature": 1.0, "trainer.max_training_steps": 2}


def native(bench: Bench, settings: Settings) -> Any:
    """Keywords of the native engine."""
    return build_engine_factory(bench.config(settings), "cpu").keywords


def vllm(bench: Bench, settings: Settings) -> Any:
    """Arguments of vLLM, whose import takes many seconds: a stand-in has the names of its fields."""
    config = bench.config({**settings, "generator.backend": "vllm"})
    with pytest.MonkeyPatch.context() as patch:
        for name, module in _vllm_modules().items():
            patch.setitem(sys.modules, name, module)
        arguments = build_engine_arguments(_engine_settings(config))
    return {name: value for name, value in vars(arguments).items() if value is not None}


def sglang(bench: Bench, settings: Settings) -> Any:
    """Arguments of SGLang on a GPU."""
    return build_server_arguments(_engine_settings(bench.config({**settings, "generator.backend": "sglang"})))


def vllm_and_sglang(bench: Bench, settings: Settings) -> Any:
    """Both must change."""
    return All(vllm(bench, settings), sglang(bench, settings))


def every_engine(bench: Bench, settings: Settings) -> Any:
    """All must change."""
    return All(*vllm_and_sglang(bench, settings).parts, native(bench, settings))


def every_engine_on_gpu(bench: Bench, settings: Settings) -> Any:
    """All must change."""
    native_on_gpu = build_engine_factory(bench.config({**settings, "generator.backend": "native"}), "cuda").keywords
    return All(*vllm_and_sglang(bench, settings).parts, native_on_gpu)


def _engine_settings(config: SkyRLConfig) -> EngineSettings:
    given = dict(build_engine_factory(config, "cuda").keywords)
    for name in ("control_timeout_seconds", "start_timeout_seconds", "request_timeout_seconds"):
        given.pop(name, None)
    return EngineSettings.from_keywords(given.pop("model_path"), given)


def _vllm_modules() -> dict[str, ModuleType]:
    names = [
        *("model", "dtype", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "load_format"),
        *("enable_expert_parallel", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enforce_eager", "seed"),
        *("gpu_memory_utilization", "enable_prefix_caching", "enable_chunked_prefill", "hf_overrides", "enable_lora"),
        *("worker_extension_cls", "enable_sleep_mode", "disable_log_stats", "distributed_executor_backend"),
        *("max_lora_rank", "max_loras", "fully_sharded_loras", "block_size", "max_logprobs"),
        "structured_outputs_config",
    ]
    modules = {
        name: ModuleType(name)
        for name in (
            *("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm"),
            *("vllm.engine", "vllm.engine.arg_utils", "vllm.platforms"),
        )
    }
    vars(modules["vllm.engine.arg_utils"])["AsyncEngineArgs"] = make_dataclass(
        "AsyncEngineArgs", [(name, Any, field(default=None)) for name in names]
    )
    vars(modules["vllm.platforms"])["current_platform"] = type("Platform", (), {"device_type": "cuda"})
    return modules


def connection(bench: Bench, settings: Settings) -> Any:
    """Return the connection of workers and engines for weights; in one process or not."""
    run = bench.run(settings)
    [infos] = [args[0] for name, args in run.record.calls if name == "connect_engines"][:1]
    return [
        (info.transport, info.encoding, info.backend, info.directory.replace(str(run.folder), ""), info.verification)
        for info in infos
    ]


def endpoint(bench: Bench, settings: Settings) -> Any:
    """The endpoint's own view of itself."""
    run = bench.run({})
    assert run.experiment is not None and run.experiment.trainer is not None
    client = run.experiment.trainer.inference_engine_client
    server = build_endpoint(bench.config(settings), client, run.experiment.tokenizer)
    return server._port, server.frontend.model_names, server.frontend._max_requests


def addresses(run: Any) -> Any:
    return [line.rpartition(":")[0] for line in run.log if "engines are served at" in line]


def has_key(bench: Bench, settings: Settings) -> Any:
    key = bench.folder / "key.txt"
    key.write_text("a-key-of-some-length")
    key.chmod(0o600)
    return read_remote_api_key(bench.config(settings).generator) is not None


def retries(bench: Bench, settings: Settings) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skyrl_gym_generator, "RETRY_DELAY_SECONDS", 0.0)
        return bench.run({**settings, "environment.env_class": "unlucky_toy"}).metrics[-1]["generate/num_retries"]


def restarts(bench: Bench, settings: Settings) -> Any:
    return bench.run(settings, first_engine_dies=True).error[:20]


ROWS = [
    Row("generator.task", "{folder}/no_task.yaml", error),
    Row("generator.backend", "sglang", lambda bench, given: str(build_engine_factory(bench.config(given), "cpu").func)),
    Row("generator.run_engines_locally", False, error, {**REMOTE, "generator.run_engines_locally": True}),
    Row("generator.remote_inference_engine_urls", ["127.0.0.1:2"], error, REMOTE),
    Row("generator.remote_inference_engine_api_key_file", "{folder}/key.txt", has_key, REMOTE),
    Row("generator.model_name", "{other_model}", native),
    Row("generator.model_dtype", "bfloat16", trajectories),
    Row("generator.num_inference_engines", 2, of_run(lambda run: run.record.num_engines, steps=False)),
    Row("generator.inference_engine_tensor_parallel_size", 2, vllm_and_sglang),
    Row("generator.inference_engine_pipeline_parallel_size", 2, vllm_and_sglang),
    Row("generator.inference_engine_data_parallel_size", 2, vllm_and_sglang),
    Row("generator.inference_engine_expert_parallel_size", 2, vllm_and_sglang, TENSOR_PARALLEL),
    Row("generator.max_num_seqs", 7, every_engine),
    Row("generator.max_num_batched_tokens", 77, vllm_and_sglang),
    Row("generator.gpu_memory_utilization", 0.5, vllm_and_sglang),
    Row("generator.enforce_eager", True, every_engine_on_gpu),
    Row("generator.enable_prefix_caching", False, every_engine),
    Row("generator.enable_chunked_prefill", False, every_engine),
    Row("generator.fully_sharded_loras", True, vllm, ADAPTERS),
    Row("generator.engine_init_kwargs", {"max_model_len": 32}, trajectories),
    Row("generator.weight_sync_backend", "nccl", error, APART),
    Row("generator.weight_transfer_threshold_cuda_ipc_GB", 1e-5, metrics),
    Row("generator.weight_sync_strategy", "checkpoint", connection),
    Row("generator.weight_sync_directory", "{run}/elsewhere", connection),
    Row("generator.weight_sync_verification", "full", connection),
    Row("generator.weight_sync_canary_interval", 1, metrics),
    Row(
        "generator.weight_sync_canary_tolerance",
        1e-12,
        error,
        {"generator.weight_sync_canary_interval": 1, "generator.model_dtype": "bfloat16"},
    ),
    Row("generator.weight_sync_pause", "wait", of_run(pauses)),
    Row("generator.max_requests_per_engine", 1, of_run(lambda run: run.record.most_requests)),
    Row("generator.max_engine_restarts", 0, restarts),
    Row("generator.engine_start_timeout_seconds", 1e-6, error),
    Row("generator.engine_control_timeout_seconds", 1e-6, error),
    Row(
        "generator.engine_health_interval_seconds",
        0.001,
        # On a busy machine an engine that is checked so often may count as dead: how the run ends does not matter.
        lambda bench, settings: any(name == "check_health" for name, _ in bench.run(settings).record.calls),
    ),
    Row(
        "generator.enable_http_endpoint",
        True,
        of_run(lambda run: len(addresses(run))),
        {**ENDPOINT, "generator.enable_http_endpoint": False},
    ),
    Row("generator.http_endpoint_host", "127.0.0.2", of_run(addresses), ENDPOINT),
    Row("generator.http_endpoint_port", 8001, endpoint),
    Row("generator.http_endpoint_max_requests", 7, endpoint),
    Row("generator.served_model_name", "anything", endpoint),
    Row("generator.n_samples_per_prompt", 2, of_run(lambda run: len(run.trajectories))),
    Row("generator.eval_n_samples_per_prompt", 2, of_run(evaluations), EVALUATED),
    Row("generator.seed", 7, trajectories),
    Row("generator.max_input_length", 200, trajectories, {"generator.max_turns": 3}),
    Row("generator.max_turns", 2, trajectories),
    Row("generator.use_conversation_multi_turn", False, trajectories, TWO_TURNS),
    Row("generator.append_eos_token_after_stop_str_in_multi_turn", False, quiet(trajectories), TWO_TURNS | STOP),
    Row("generator.chat_template_kwargs", {"shout": "HEY"}, trajectories, TEMPLATE),
    Row("generator.step_wise_trajectories", True, of_run(lambda run: len(run.trajectories)), TWO_TURNS),
    Row("generator.merge_stepwise_output", True, of_run(lambda run: len(run.trajectories)), STEP_WISE),
    Row("generator.zero_reward_on_non_stop", True, metrics),
    Row("generator.apply_overlong_filtering", True, metrics),
    Row("generator.overlong_filtering_by", "end_token", quiet(metrics), FILTERING | STOP),
    Row("generator.max_rollout_retries", 1, retries),
    Row("generator.request_timeout_seconds", 1e-6, error),
    Row("generator.chat_template.source", "name", error, TEMPLATE),
    Row("generator.chat_template.name_or_path", "{folder}/other_template.jinja", trajectories, TEMPLATE),
    Row("environment.env_class", "sometimes_toy", metrics),
    Row("environment.skyrl_gym.max_env_workers", 0, metrics),
    Row("environment.skyrl_gym.env_timeout_seconds", 1e-9, error),
    Row("environment.skyrl_gym.<env_class>", {"bonus": 1.0}, metrics),
]
for section, given, see in (
    ("generator.sampling_params", {}, trajectories),
    ("generator.eval_sampling_params", EVALUATED, trajectories),
):
    ROWS += [
        Row(f"{section}.max_generate_length", 3, see, given),
        Row(f"{section}.temperature", 0.2, see, given),
        Row(f"{section}.top_p", 0.1, see, given),
        Row(f"{section}.top_k", 2, see, given),
        Row(f"{section}.min_p", 0.9, see, given),
        Row(f"{section}.repetition_penalty", 2.0, see, given),
        Row(f"{section}.logprobs", None, see, given),
        Row(f"{section}.stop", STOP["generator.sampling_params.stop"], see, given),
        Row(f"{section}.additional_kwargs", {"ignore_eos": True, "stop_token_ids": list(range(5, 60))}, see, given),
    ]
