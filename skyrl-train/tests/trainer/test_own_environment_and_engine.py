"""An environment and an engine of one's own are a file each; the engine has the line that registers it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import validate_cfg
from skyrl_train.config.engine_kinds import EngineRegistry, EngineTraits, register_engine
from skyrl_train.config.validation import validate_environments
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

OWN_ENVIRONMENT = {"env_class": "own_environment:LetterEnv", "skyrl_gym": {"LetterEnv": {"letter": "a"}}}


class CountingEngine(NativeInferenceEngine):
    """The native engine, with a count of the requests that it answered."""

    num_requests = 0

    async def generate(self, request: Any) -> Any:
        CountingEngine.num_requests += 1
        return await super().generate(request)


@pytest.fixture
def counting_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CountingEngine, "num_requests", 0)
    register_engine("counting", requires=EngineTraits(is_in_process=True))(CountingEngine)
    yield
    EngineRegistry.unregister("counting")


def test_custom_environment_settings_are_checked(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    validate_environments(settings(tmp_path, {"environment": OWN_ENVIRONMENT}))
    wrong = OWN_ENVIRONMENT | {"skyrl_gym": {"LetterEnv": {"leter": "a"}}}
    with pytest.raises(ConfigError, match="letter"):
        validate_environments(settings(tmp_path, {"environment": wrong}))


@pytest.mark.slow
@pytest.mark.usefixtures("counting_engine")
def test_custom_environment_and_engine_train_run(
    settings: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    changes = {"environment": OWN_ENVIRONMENT, "generator": {"backend": "counting"}}
    steps = run(validate_cfg(settings(tmp_path, changes)))
    assert len(steps) == 2
    assert CountingEngine.num_requests >= 2 * 4 * 4  # steps x prompts x samples
    assert all(step["policy/grad_norm"] >= 0 for step in steps)
