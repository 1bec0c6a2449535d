"""A loss and an estimator of one's own are one file (`own_algorithm.py`): settings, checks and training follow from the
registration."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import AlgorithmConfig, SkyRLConfig, compose_config, validate_cfg
from skyrl_train.config.fingerprint import compute_settings_fingerprint, flatten_settings
from skyrl_train.errors import ConfigError
from skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry
from skyrl_train_testing.invariances import check_advantage_estimator, check_policy_loss

CHOSEN = {"policy_loss_type": "pull", "advantage_estimator": "best_of_group"}


@pytest.fixture
def own_algorithm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    importlib.import_module("own_algorithm")
    yield
    del sys.modules["own_algorithm"]
    PolicyLossRegistry.unregister("pull")
    AdvantageEstimatorRegistry.unregister("best_of_group")


def checked(algorithm: dict[str, Any], **generator: Any) -> SkyRLConfig:
    values = {
        "trainer": {"placement": {"device": "cpu"}, "algorithm": {"use_kl_loss": False} | CHOSEN | algorithm},
        "generator": generator,
    }
    return validate_cfg(SkyRLConfig.from_dict(values))


@pytest.mark.usefixtures("own_algorithm")
@pytest.mark.parametrize(
    "algorithm, generator, message",
    [
        ({"pull": {"strenght": 1.0}}, {}, r"pull\.strength"),
        ({"pull": {"strength": "much"}}, {}, r"trainer\.algorithm\.pull\.strength"),
        ({"pull": {"strength": -1.0}}, {}, r"trainer\.algorithm\.pull\.strength"),
        ({"pull": {"power": 3}}, {}, r"trainer\.algorithm\.pull"),
        ({}, {"sampling_params": {"logprobs": None}}, "policy_loss_type=pull"),
        ({}, {"n_samples_per_prompt": 1}, "advantage_estimator=best_of_group"),
    ],
)
def test_custom_loss_settings_and_requirements_are_checked(
    algorithm: dict[str, Any], generator: dict[str, Any], message: str
):
    checked({})
    with pytest.raises(ConfigError, match=message):
        checked(algorithm, **generator)


def test_settings_of_unregistered_loss_are_unknown():
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.pull"):
        SkyRLConfig.from_dict({"trainer": {"algorithm": {"pull": {"strength": 1.0}}}})


@pytest.mark.usefixtures("own_algorithm")
def test_command_line_selects_custom_loss_without_fingerprint_change():
    before = compute_settings_fingerprint(SkyRLConfig())
    assert "trainer.algorithm.pull.strength" not in flatten_settings(SkyRLConfig())
    own = ["trainer.algorithm.pull.strength=0.25", *(f"trainer.algorithm.{k}={v}" for k, v in CHOSEN.items())]
    device = ["trainer.placement.device=cpu", "trainer.algorithm.use_kl_loss=false"]
    config = validate_cfg(compose_config([*own, *device]))
    algorithm: Any = config.trainer.algorithm
    assert algorithm.pull.strength == 0.25
    assert flatten_settings(config)["trainer.algorithm.pull.strength"] == 0.25
    assert compute_settings_fingerprint(config) != before == compute_settings_fingerprint(SkyRLConfig())


@pytest.mark.usefixtures("own_algorithm")
def test_custom_loss_and_estimator_pass_conformance_checks():
    own = sys.modules["own_algorithm"]
    config = AlgorithmConfig.from_dict({"pull": {"strength": 0.5}})
    check_policy_loss(own.pull_loss, config)
    check_advantage_estimator(own.best_of_group, config)


@pytest.mark.slow
@pytest.mark.usefixtures("own_algorithm")
def test_custom_loss_and_estimator_train_run(settings: Any, run: Any, tmp_path: Path):
    cfg = settings(tmp_path, {"trainer": {"algorithm": CHOSEN | {"pull": {"strength": 0.125}}}})
    steps = run(validate_cfg(cfg))
    assert len(steps) == 2
    assert all(step["policy/loss_metrics/strength"] == pytest.approx(0.125) for step in steps)
    assert all(step["policy/grad_norm"] > 0 for step in steps)
