"""A training backend of one's own (`sgd_backend.py`, 75 lines) is registered by one line and trains a run."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig, validate_cfg
from skyrl_train.config.training_backends import (
    TrainingBackendRegistry,
    TrainingBackendTraits,
    register_training_backend,
)
from skyrl_train.errors import ConfigError

TRAITS = TrainingBackendTraits(max_ranks=1, sequence_parallel=False, adapters=False)


@pytest.fixture
def sgd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "training_backends")
    backend = importlib.import_module("sgd_backend").SGDBackend
    register_training_backend("sgd", requires=TRAITS)(backend)
    yield
    TrainingBackendRegistry.unregister("sgd")


@pytest.mark.parametrize("launcher", ["inline", pytest.param("ray", marks=pytest.mark.full)])
def test_custom_backend_trains_run(sgd: None, settings: Any, run: Any, tmp_path: Path, launcher: str):
    """AdamW's first step on this model is the learning rate in every weight; SGD's is the learning rate x gradient."""
    cfg = settings(tmp_path, {"trainer": {"strategy": "sgd", "placement": {"launcher": launcher}}})
    steps = run(validate_cfg(cfg))
    assert [step["policy/skipped_updates"] for step in steps] == [0.0, 0.0]
    assert all(step["policy/grad_norm"] > 0 for step in steps)


@pytest.mark.usefixtures("sgd")
@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"strategy": "sdg"}, r"trainer\.strategy"),
        ({"placement": {"policy_num_gpus_per_node": 2}}, "at most 1 ranks per model; .*is 2"),
        ({"policy": {"model": {"lora": {"rank": 4}}}}, r"trainer\.policy\.model\.lora\.rank=4"),
        (
            {"policy": {"routing_replay": "R2"}},
            r"trainer\.strategy=fsdp2",
        ),
    ],
)
def test_model_unsupported_by_backend_is_refused_before_start(trainer: dict[str, Any], message: str):
    placement = {"device": "cpu", **trainer.pop("placement", {})}
    values = {"strategy": "sgd", "placement": placement, "algorithm": {"use_kl_loss": False}, **trainer}
    with pytest.raises(ConfigError, match=message):
        validate_cfg(SkyRLConfig.from_dict({"trainer": values}))


def test_fsdp_selects_fsdp2_with_warning():
    trainer = {"strategy": "fsdp", "placement": {"device": "cpu"}, "algorithm": {"use_kl_loss": False}}
    with pytest.warns(FutureWarning, match=r"trainer\.strategy=fsdp"):
        cfg = validate_cfg(SkyRLConfig.from_dict({"trainer": trainer}))
    assert cfg.trainer.strategy == "fsdp2"
