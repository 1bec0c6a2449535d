"""Wrong settings of engines are errors before anything starts."""

import socket
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.rules.engines import check_engines as check_engine_rules
from skyrl_train.entrypoints.engines import check_engines, start_engines
from skyrl_train.errors import ConfigError


def config(model: str, **generator) -> SkyRLConfig:
    return SkyRLConfig.from_dict({"trainer": {"policy": {"model": {"path": model}}}, "generator": generator})


def test_unknown_backend_error_lists_known_backends():
    with pytest.raises(ConfigError, match=r"generator\.backend"):
        config("model", backend="vlm")


def test_unknown_native_keyword_error_suggests_nearest(tiny_model):
    with pytest.raises(ConfigError, match=r"engine_init_kwargs\.max_model_length"):
        check_engines(config(tiny_model, backend="native", engine_init_kwargs={"max_model_length": 9}))
    check_engines(config(tiny_model, backend="native", engine_init_kwargs={"max_model_len": 9}))


@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_tensor_parallel_size_must_divide_heads(tiny_model, parallel):
    check_engines(config(tiny_model, backend="vllm", inference_engine_tensor_parallel_size=parallel))


def test_indivisible_heads_error_lists_valid_sizes(tiny_model):
    with pytest.raises(ConfigError, match="parallel_size=3"):
        check_engines(config(tiny_model, backend="vllm", inference_engine_tensor_parallel_size=3))


def test_unreachable_server_is_named(tiny_model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = config(tiny_model, run_engines_locally=False, remote_inference_engine_urls=[url])
        with pytest.raises(ConfigError, match=rf"remote_inference_engine_urls: .*{url}(?s:.*)Start the server"):
            start_engines(settings, AutoTokenizer.from_pretrained(tiny_model))


def rule_of(**generator: Any) -> None:
    """The rules of engines alone: neither SGLang nor vLLM need be installed."""
    check_engine_rules(SkyRLConfig.from_dict({"generator": generator}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"inference_engine_data_parallel_size": 2}, "generator.inference_engine_data_parallel_size=2 must be 1"),
        ({"inference_engine_pipeline_parallel_size": 3}, "inference_engine_pipeline_parallel_size=3 must be 1"),
        ({"engine_init_kwargs": {"dp_size": 2}}, "generator.engine_init_kwargs.dp_size=2 must be 1"),
    ],
)
def test_sglang_rejects_multiple_parallel_groups_at_start(settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=rf"{said} with generator.backend=sglang.*num_inference_engines"):
        rule_of(backend="sglang", **settings)
    rule_of(backend="sglang", inference_engine_tensor_parallel_size=2)
    if "engine_init_kwargs" not in settings:
        rule_of(backend="vllm", **settings)


def test_speculative_decoding_is_rejected_at_start():
    asked = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    with pytest.raises(ConfigError, match=r"engine_init_kwargs\.speculative_config"):
        rule_of(backend="vllm", engine_init_kwargs=asked)
    rule_of(backend="vllm", engine_init_kwargs={"speculative_config": None})
