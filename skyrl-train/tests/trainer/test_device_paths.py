"""Each path of training on a GPU, and on a CPU where no other test takes it."""

import math
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from async_runs import asynchronous
from safetensors.torch import load_file

from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products; read at the first one

ON_CPU, ON_GPU = pytest.param("cpu", id="cpu"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)
BOTH = pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
MODELS = {
    "policy": {"model": {"lora": {"rank": 4}}},
    "algorithm": {"advantage_estimator": "gae", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "critic_mini_batch_size": 2,
}
VLLM = {
    "backend": "vllm",
    "gpu_memory_utilization": 0.2,
    "enforce_eager": True,
    "weight_sync_verification": "full",
    "engine_init_kwargs": {"max_model_len": 256},
}
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

pytestmark = [
    # DeepSpeed imports torch's compiler with its first engine.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with heads that kernels of GPUs support."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 64, "head_dim": 32, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    build_tiny_qwen3(**sizes).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def train(settings: Any, merged: Any, run: Any, model: str) -> Any:
    """`train(folder, device, changes of trainer, changes of generator)`: the metrics of each step."""

    def train(
        folder: Path, device: str, trainer: dict[str, Any], generator: dict[str, Any] | None = None
    ) -> list[dict[str, float]]:
        policy = {"policy": {"model": {"path": model}}, "placement": {"device": device}}
        return run(settings(folder, {"trainer": merged(policy, trainer), "generator": generator or {}}))

    return train


def assert_trained(steps: list[dict[str, float]], gap: float = 1e-3) -> None:
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["policy/grad_norm"] > 0 == row["policy/skipped_updates"]
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < gap


@BOTH
def test_critic_reference_and_adapters_train(device: str, train: Any, model: str, tmp_path: Path):
    """They take turns on the device: each is offloaded while others compute."""
    steps = train(tmp_path, device, MODELS | {"critic": {"model": {"path": model}}})
    assert_trained(steps)
    assert all(row["critic/grad_norm"] > 0 for row in steps)


@pytest.mark.parametrize("device", [pytest.param("cpu", id="cpu", marks=pytest.mark.slow), ON_GPU])
@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(asynchronous(), id="asynchronous"),  # its engine is behind the trainer
        pytest.param({"strategy": "deepspeed"}, id="deepspeed"),
        pytest.param({"strategy": "megatron"}, id="megatron"),
        pytest.param({"gradient_checkpointing": "auto"}, id="checkpointing as the planner decides"),
        pytest.param({"bf16": True, "use_sample_packing": True, "gradient_checkpointing": True}, id="packed bfloat16"),
    ],
)
def test_policy_trains(device: str, trainer: dict[str, Any], train: Any, tmp_path: Path):
    in_half = trainer.get("bf16", False)
    steps = train(tmp_path, device, trainer, {"model_dtype": "bfloat16"} if in_half else None)
    assert_trained(steps, gap=math.inf if "fully_async" in trainer else 0.2 if in_half else 1e-3)


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", [pytest.param("cpu", id="cpu", marks=pytest.mark.slow), ON_GPU])
def test_resumed_run_is_bitwise_equal_with_deterministic_kernels(device: str, train: Any, tmp_path: Path):
    changes = {"ckpt_interval": 1, "hf_save_interval": 2}
    whole = train(tmp_path / "whole", device, changes)
    train(tmp_path / "halves", device, changes | {"max_training_steps": 1, "hf_save_interval": -1})
    halves = train(tmp_path / "halves", device, changes)
    exported = "exports/global_step_2/policy/model.safetensors"
    weights, expected = (load_file(tmp_path / name / exported) for name in ("halves", "whole"))
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    assert halves[1]["policy/grad_norm"] == whole[1]["policy/grad_norm"]


@pytest.mark.gpu
@needs_vllm
@pytest.mark.parametrize("trainer", [{}, {"policy": {"model": {"lora": {"rank": 8}}}}], ids=["full", "adapters"])
def test_colocated_vllm_trains(trainer: dict[str, Any], train: Any, tmp_path: Path):
    """The engine sleeps at level 2 before a sync of all weights, at level 1 before one of adapters."""
    changes = {"bf16": True, "placement": {"launcher": "ray", "colocate_all": True}} | trainer
    assert_trained(train(tmp_path, "cuda", changes, VLLM | {"model_dtype": "bfloat16"}), gap=0.2)


@pytest.mark.gpu(2)
@needs_vllm
def test_vllm_on_its_own_gpu_trains_asynchronously(train: Any, merged: Any, tmp_path: Path):
    changes = merged(asynchronous(), {"bf16": True, "placement": {"launcher": "ray"}})
    assert_trained(train(tmp_path, "cuda", changes, VLLM | {"model_dtype": "bfloat16"}), gap=math.inf)
