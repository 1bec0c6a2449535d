"""A rollout engine of one's own: its file, and the line that registers it."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl_train.config import SkyRLConfig, validate_cfg
from skyrl_train.config.engine_kinds import EngineRegistry, EngineTraits, register_engine
from skyrl_train.entrypoints.engines import build_engine_factory, check_engines
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.base import Completion, GenerationRequest, InferenceEngineInput
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train_testing.engine_conformance import (
    CHECKS,
    ConformanceReport,
    EngineUnderTest,
    check_engine,
    make_tiny_model,
)


class ShortEngine(NativeInferenceEngine):
    """An engine that writes at most `longest` tokens a request."""

    def __init__(self, *, longest: int, **keywords: Any):
        super().__init__(**keywords)
        self._longest = longest

    async def generate(self, request: GenerationRequest) -> Completion:
        longest = min(request.sampling_params.get("max_tokens", self._longest), self._longest)
        return await super().generate(
            replace(request, sampling_params=request.sampling_params | {"max_tokens": longest})
        )


def even_number_of_sequences(generator: Any) -> None:
    if generator.max_num_seqs % 2:
        raise ConfigError(f"generator.max_num_seqs={generator.max_num_seqs} must be even with generator.backend=short")


@pytest.fixture
def short_engine() -> Iterator[None]:
    """The one place: its declaration beside it."""
    register_engine(
        "short",
        requires=EngineTraits(
            unread_settings=("gpu_memory_utilization",),
            keywords=lambda cfg, device: {"longest": cfg.generator.max_turns + 1},
            check_settings=even_number_of_sequences,
        ),
    )(ShortEngine)
    yield
    EngineRegistry.unregister("short")


def settings(model: str, **generator: Any) -> SkyRLConfig:
    own = {"backend": "short", "model_dtype": "float32", "max_num_seqs": 4}
    return SkyRLConfig.from_dict(
        {
            "trainer": {"policy": {"model": {"path": model}}, "placement": {"device": "cpu"}},
            "generator": own | generator,
        }
    )


@pytest.mark.usefixtures("short_engine")
def test_registered_custom_engine_generates_for_client(tiny_model: str):
    cfg = validate_cfg(settings(tiny_model))
    assert cfg.generator.backend == "short"
    check_engines(cfg)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    async def answers() -> Any:
        client = InferenceEngineClient([build_engine_factory(cfg, "cpu")()], tokenizer, cfg)
        try:
            prompts = [[1, 2, 3], [4, 5]]
            return await client.generate_batch(
                InferenceEngineInput(
                    prompt_token_ids=prompts, sampling_params={"max_tokens": 8, "ignore_eos": True, "logprobs": 0}
                )
            )
        finally:
            await client.teardown()

    output = asyncio.run(answers())
    assert [len(ids) for ids in output["response_ids"]] == [2, 2]
    assert all(len(values) == 2 for values in output["response_logprobs"])


def test_custom_engine_passes_conformance_checks(tmp_path: Path):
    """A few that concern what it overrides; the tests of the kit have the rest."""
    names = {
        "check_max_tokens",
        "check_end_of_sequence",
        "check_samples_differ",
        "check_seeds",
    }

    model = make_tiny_model(tmp_path / "tiny", tied=True)

    async def report() -> ConformanceReport:
        engine = ShortEngine(longest=64, model_path=model, dtype="float32")
        try:
            return await check_engine(
                EngineUnderTest(engine, model), [check for check in CHECKS if check.name in names]
            )
        finally:
            await engine.teardown()

    outcome = asyncio.run(report())
    assert {each.check.name for each in outcome.outcomes if each.result == "passed"} == names, str(outcome)


@pytest.mark.usefixtures("short_engine")
def test_custom_engine_rules_are_checked_with_run_settings(tiny_model: str):
    with pytest.raises(ConfigError, match=r"generator\.backend=short"):
        validate_cfg(settings(tiny_model, max_num_seqs=3))
    with pytest.raises(ConfigError, match=r"generator\.backend=short"):
        validate_cfg(settings(tiny_model, gpu_memory_utilization=0.5))
    with pytest.raises(ConfigError, match="backend=short"):
        validate_cfg(settings(tiny_model, run_engines_locally=False, remote_inference_engine_urls=["a:1"]))


def test_unregistered_engine_error_lists_registered_names(tiny_model: str):
    with pytest.raises(ConfigError, match=r"generator\.backend"):
        settings(tiny_model)
