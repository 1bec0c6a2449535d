"""Registries: entries with requirements and settings, and no name of an entry anywhere but at its registration."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import skyrl_train
from skyrl_train.config import AlgorithmConfig, SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.config.registry import Registry
from skyrl_train.config.requirements import AdvantageEstimatorRegistry, PolicyLossRegistry, register_policy_loss
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.errors import ConfigError


@dataclass(frozen=True)
class Needs:
    salt: bool = False


def test_provider_is_imported_lazily_and_retried_after_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[str, Needs] = Registry("dish", Needs, ("dishes_of_a_test",))
    monkeypatch.setattr(sys, "dishes_of_a_test", registry, raising=False)
    with pytest.raises(ModuleNotFoundError):
        registry.get("soup")
    lines = [
        "import sys",
        "sys.dishes_of_a_test.register('soup', 'water', requires=None)",
        "sys.dishes_of_a_test.register('bread', 'flour')",
    ]
    (tmp_path / "dishes_of_a_test.py").write_text("\n".join(lines))
    assert "dishes_of_a_test" not in sys.modules
    assert list(registry.list_registrations()) == ["soup", "bread"]
    assert registry.get_requirements("soup") == Needs()
    sys.modules.pop("dishes_of_a_test")


def test_registry_stores_requirements_and_rejects_bad_names():
    registry: Registry[str, Needs] = Registry("dish", Needs)
    registry.register("soup", "water", requires=Needs(salt=True))
    assert (registry.get("soup"), registry.get_requirements("soup").salt) == ("water", True)
    assert registry.get_requirements("never registered") == Needs()
    with pytest.raises(ValueError, match="'soup'"):
        registry.register("soup", "tea")
    with pytest.raises(ValueError, match="soup"):
        registry.get("soap")


@dataclass(kw_only=True)
class Own:
    weight: float = 1.0
    """A number."""


@pytest.fixture
def own_loss(request: pytest.FixtureRequest) -> Iterator[str]:
    register_policy_loss(request.param, settings=Own)(lambda *_: None)
    yield request.param
    PolicyLossRegistry.unregister(request.param)


@pytest.mark.parametrize(
    "own_loss, message",
    [
        ("gamma", r"trainer\.algorithm\.gamma"),
        ("my-loss", r"trainer\.algorithm\.my"),
    ],
    indirect=["own_loss"],
)
def test_settings_with_invalid_name_are_rejected(own_loss: str, message: str):
    with pytest.raises(ConfigError, match=message):
        SkyRLConfig()


@pytest.mark.parametrize("own_loss", ["mine"], indirect=True)
def test_section_is_created_on_access(own_loss: str):
    algorithm = AlgorithmConfig()
    assert "mine" not in algorithm.sections
    algorithm.section(Own).weight = 2.0
    assert algorithm.mine.weight == 2.0  # type: ignore[attr-defined]
    algorithm.mine = Own(weight=3.0)  # type: ignore[attr-defined]
    assert algorithm.section(Own).weight == 3.0
    assert AlgorithmConfig(mine=Own(weight=3.0)) == algorithm  # type: ignore[call-arg]
    assert AlgorithmConfig.from_dict({"mine": {"weight": 3.0}}) == algorithm


def compared_texts(path: Path) -> Iterator[str]:
    """Texts that a file compares something with, alone or in a tuple, list or set."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                for part in side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


def test_source_has_no_comparison_with_registered_names():
    registries = (PolicyLossRegistry, AdvantageEstimatorRegistry, EngineRegistry, TrainingBackendRegistry)
    names = {name for registry in registries for name in registry.list_registrations()}
    assert {"dpo", "maxrl", "native", "megatron"} < names
    files = sorted(Path(str(skyrl_train.__file__)).parent.rglob("*.py"))
    found = [f"{path}: {text!r}" for path in files for text in compared_texts(path) if text in names]
    assert not found, "registrations carry requirements and traits: read those"
