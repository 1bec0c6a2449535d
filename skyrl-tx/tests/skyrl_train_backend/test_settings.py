"""Meaning of `--backend-config` for the backend, in skyrl_train's names; wrong settings are errors that name them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tx.errors import ConfigError
from tx.tinker.backends.skyrl_train.settings import (
    GENERATOR_SETTINGS,
    TRAINING_SETTINGS,
    SkyRLTrainSettings,
    get_setting_names,
)
from tx.tinker.backends.torch.settings import TrainingSettings

NATIVE = {"generator.backend": "native", "device": "cpu"}


@pytest.mark.parametrize(
    "values, text",
    [
        ({"num_process": 2}, "unknown setting backend_config.num_process; did you mean num_processes"),
        ({"gpu_memory_utilization": 0.5}, "did you mean generator.gpu_memory_utilization"),
        ({"generator.num_engines": 2}, "did you mean generator.num_inference_engines"),
        ({"generator.max_turns": 3}, "unknown setting backend_config.generator.max_turns"),
        ({"generator.backend": "vlm"}, "generator.backend must be one of auto, native, vllm, sglang; got 'vlm'"),
        (NATIVE | {"generator.max_num_seqs": "16"}, "generator.max_num_seqs must be an int"),
        (NATIVE | {"generator.inference_engine_tensor_parallel_size": 2}, "is not used by generator.backend=native"),
        (NATIVE | {"num_processes": 0}, "backend_config.num_processes must be above 0; got 0"),
        (NATIVE | {"device": "cuda:1"}, "backend_config.device must be one of auto, cpu, cuda; got 'cuda:1'"),
        ({"generator.backend": "sglang"}, "scripts/setup.sh --extra sglang"),
    ],
)
def test_wrong_setting_is_named(values: dict[str, Any], text: str):
    if values == {"generator.backend": "sglang"} and find_spec("sglang") is not None:
        pytest.skip("SGLang is installed")
    with pytest.raises(ConfigError) as wrong:
        SkyRLTrainSettings.from_dict(values)
    assert text in str(wrong.value)


def engine_config(**values: Any):
    settings = SkyRLTrainSettings.from_dict(values)
    return settings.engine_config(Path("/models/qwen"), Path("/run"), max_context=4096)


def test_engine_config_declares_adapter_limits():
    config = engine_config(**NATIVE, max_lora_rank=16, max_loaded_adapters=3, num_processes=2)
    assert config.trainer.policy.model.lora.rank == 16 and config.generator.weight_sync_strategy == "adapter"
    assert config.generator.engine_init_kwargs == {"max_model_len": 4096, "max_loras": 3}
    assert config.generator.model_dtype == "float32" and config.generator.model_name == "/models/qwen"
    assert config.trainer.placement.policy_world_size == 2 and not config.trainer.placement.colocate_all


def test_user_engine_settings_override_derived_ones():
    kwargs = {"max_model_len": 1024}
    config = engine_config(**NATIVE, **{"generator.engine_init_kwargs": kwargs, "generator.model_dtype": "bfloat16"})
    assert config.generator.engine_init_kwargs == {"max_model_len": 1024, "max_loras": 8}
    assert config.generator.model_dtype == "bfloat16"


def test_addresses_mean_servers_started_elsewhere():
    config = engine_config(device="cpu", **{"generator.remote_inference_engine_urls": ["10.0.0.1:8001"]})
    assert not config.generator.run_engines_locally and config.generator.backend == "auto"


def test_every_setting_of_training_is_there():
    training = set(TrainingSettings.__dataclass_fields__)
    assert set(TRAINING_SETTINGS) <= training
    assert training <= set(get_setting_names())
    assert {f"generator.{name}" for name in GENERATOR_SETTINGS} <= set(get_setting_names())
