"""Engines with one mistake each: the report finds that mistake, and no other."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_inspect.mismatch.answers import SAMPLINGS, EngineAnswers, Questions, send_questions
from skyrl_inspect.mismatch.cells import EngineName
from skyrl_inspect.mismatch.report import Report, make_report
from skyrl_train.config import SkyRLConfig
from skyrl_train.inference_engines.base import (
    Completion,
    EngineInfo,
    GenerationRequest,
    InferenceEngineInterface,
)
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

PROMPTS = [[5], [7, 8, 9], list(range(20, 45)), [30, 31, 32, 33, 34, 35, 36, 37]] * 2


def answers_of(engine: InferenceEngineInterface, samplings: list[str]) -> EngineAnswers:
    questions = Questions(prompts=PROMPTS, samplings=[SAMPLINGS[name] for name in samplings], max_tokens=24, seed=1)

    async def ask_and_end() -> EngineAnswers:
        try:
            return await send_questions(engine, questions)
        finally:
            await engine.teardown()

    return asyncio.run(ask_and_end())


def report_on(
    model: str,
    *engines: InferenceEngineInterface,
    samplings: tuple[str, ...] = ("temperature 1",),
    bf16: bool = False,
    clip: float = 0.2,
) -> Report:
    """Make the report on these engines beside a trainer of `model`."""
    cfg = SkyRLConfig.from_dict(
        {
            "trainer": {
                "policy": {"model": {"path": model}},
                "algorithm": {"eps_clip_low": clip, "eps_clip_high": clip},
                "bf16": bf16,
                "placement": {"device": "cpu"},
            },
            "generator": {"backend": "native"},
        }
    )
    said = [answers_of(engine, list(samplings)) for engine in engines]
    named = [(EngineName(backend="native", dtype=answers.info.dtype), answers) for answers in said]
    return make_report(cfg, named, [SAMPLINGS[name] for name in samplings])


def kinds(report: Report) -> list[str]:
    return [finding.kind for finding in report.findings]


class LateLogProbs(NativeInferenceEngine):
    """Engine whose log-probs are those of the distribution it sampled from, after all processing: recomputed here by
    another transformers model, over whole responses.
    """

    def __init__(self, model: str):
        super().__init__(model)
        self.other = AutoModelForCausalLM.from_pretrained(model)

    async def generate(self, request: GenerationRequest) -> Completion:
        completion = await super().generate(request)
        if "prompt_logprobs" in request.sampling_params:
            return completion
        late = self.late(request.prompt_token_ids, completion.token_ids, request.sampling_params)
        return replace(completion, log_probs=late)

    @torch.no_grad()
    def late(self, prompt: list[int], response: list[int], params: dict[str, Any]) -> list[float]:
        all_logits = self.other(torch.tensor([[*prompt, *response]])).logits[0]
        found = []
        for index, token in enumerate(response):
            logits = all_logits[len(prompt) + index - 1]
            for seen in {*prompt, *response[:index]}:
                penalty = params.get("repetition_penalty", 1.0)
                logits[seen] = logits[seen] / penalty if logits[seen] > 0 else logits[seen] * penalty
            probabilities = (logits / params["temperature"]).softmax(-1)
            likeliest = probabilities.argsort(descending=True)
            mass = probabilities[likeliest].cumsum(0)
            kept = likeliest[: int((mass < params.get("top_p", 1.0) - 1e-6).sum()) + 1]
            if params.get("top_k", -1) > 0:
                kept = kept[: params["top_k"]]
            found.append((probabilities[token] / probabilities[kept].sum()).log().item())
        return found


class IgnoresTemperature(NativeInferenceEngine):
    """Draws and reports at the temperature that it likes best."""

    def __init__(self, model: str, temperature: float):
        super().__init__(model)
        self.temperature = temperature

    async def generate(self, request: GenerationRequest) -> Completion:
        if "prompt_logprobs" not in request.sampling_params:
            request = replace(request, sampling_params=request.sampling_params | {"temperature": self.temperature})
        return await super().generate(request)


class AltersLogProbs(NativeInferenceEngine):
    """Engine whose answers' log-probs a function changes, row by row."""

    def __init__(self, model: str, alter: Callable[[list[float]], list[float]]):
        super().__init__(model)
        self.alter = alter

    async def generate(self, request: GenerationRequest) -> Completion:
        completion = await super().generate(request)
        return replace(completion, log_probs=self.alter(completion.log_probs or []))


class WithoutPromptLogProbs(NativeInferenceEngine):
    """Says so."""

    async def describe(self) -> EngineInfo:
        return replace(await super().describe(), unsupported={"prompt_log_probs": "there are none"})


def changed_copy(model: str, folder: Path, layer: str, factor: float) -> str:
    """The model with one layer's weights multiplied, in another folder."""
    changed: Any = AutoModelForCausalLM.from_pretrained(model)
    changed.get_parameter(layer).data.mul_(factor)
    changed.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return str(folder)


def test_correct_float32_engine_agrees_to_five_digits(sharp_model: str):
    report = report_on(sharp_model, NativeInferenceEngine(sharp_model), samplings=tuple(SAMPLINGS))
    assert kinds(report) == ["agreement"]
    assert len(report.cells) == 1 + len(SAMPLINGS)
    for cell in report.cells:
        gap = report.gap(cell)
        assert gap is not None
        assert gap.num_tokens >= 60
        assert gap.mean < 1e-5
        assert gap.outside_clip == 0
        assert gap.ess > 0.9999


def test_changed_layer_is_reported_as_wrong_weights(sharp_model: str, tmp_path: Path):
    other = changed_copy(sharp_model, tmp_path / "other", "model.layers.1.mlp.down_proj.weight", 1.2)
    for dtype in ("float32", "bfloat16"):  # in either it is more than rounding
        report = report_on(sharp_model, NativeInferenceEngine(other, dtype=dtype), samplings=("top_p 0.9",))
        assert kinds(report) == ["weights"]
    assert "generator.model_name" in report.findings[0].text


def test_wrong_weights_are_found_by_responses_without_prompt_log_probs(sharp_model: str, tmp_path: Path):
    sound = report_on(sharp_model, WithoutPromptLogProbs(sharp_model))
    assert kinds(sound) == ["agreement"]
    assert sound.not_measured == [("native float32, canary", "ValueError: there are none")]
    other = changed_copy(sharp_model, tmp_path / "other", "model.layers.1.mlp.down_proj.weight", 1.2)
    report = report_on(sharp_model, WithoutPromptLogProbs(other), samplings=("temperature 1", "top_k 20"))
    assert kinds(report) == ["weights"]
    assert "sampled tokens" in report.findings[0].text


def test_unexplained_gap_is_reported_as_such(sharp_model: str):
    """Every log-prob is off by a tenth, up and down in turn: nothing that an engine does makes that."""
    noisy = AltersLogProbs(sharp_model, lambda row: [value + 0.1 * (-1) ** i for i, value in enumerate(row)])
    report = report_on(sharp_model, noisy, samplings=("temperature 1", "top_p 0.9"))
    assert kinds(report) == ["unexplained"]
    assert "temperature 1, top_p 0.9: log-probs differ from the trainer's by 0.1 " in report.findings[0].text


def test_other_rope_theta_is_reported_as_attention_difference(sharp_model: str):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    report = report_on(sharp_model, NativeInferenceEngine(sharp_model, model_config_kwargs=rope))
    assert kinds(report) == ["attention"]
    assert "rope_theta" in report.findings[0].text


@pytest.mark.parametrize("used, asked", [(1.0, "temperature 0.7"), (0.8, "temperature 1")])
def test_another_temperature_is_named(sharp_model: str, used: float, asked: str):
    report = report_on(sharp_model, IgnoresTemperature(sharp_model, used), samplings=(asked,))
    assert kinds(report) == ["temperature"]
    [finding] = report.findings
    said = "the temperature 0.7 is not applied" if used == 1.0 else "the temperature 0.8, not 1"
    assert said in finding.text


def test_log_probs_after_truncation_and_penalty_are_told_apart(sharp_model: str):
    """Plain sampling is the same before and after, so only the cells with something to process are named."""
    samplings = ("temperature 1", "temperature 0.7", "top_p 0.9", "top_k 20", "repetition_penalty 1.2")
    report = report_on(sharp_model, LateLogProbs(sharp_model), samplings=samplings)
    assert kinds(report) == ["truncation", "penalty"]
    truncation, penalty = report.findings
    assert "top_p 0.9, top_k 20:" in truncation.text
    assert "repetition_penalty 1.2:" in penalty.text


def test_bfloat16_engine_with_float32_trainer_is_reported_as_rounding(sharp_model: str):
    engines = NativeInferenceEngine(sharp_model, dtype="bfloat16"), NativeInferenceEngine(sharp_model)
    report = report_on(sharp_model, *engines)
    assert {finding.severity for finding in report.findings} == {"warning"}
    [finding] = [finding for finding in report.findings if finding.kind == "number format"]
    assert finding.text.startswith("native bfloat16 engine and float32 trainer")
    assert "generator.model_dtype=float32 leaves" in finding.text
    assert "trainer.bf16=true leaves" in finding.text  # both then round alike


def test_float32_engine_with_bfloat16_trainer_is_trainer_rounding(sharp_model: str):
    report = report_on(sharp_model, NativeInferenceEngine(sharp_model), bf16=True)
    [finding] = [finding for finding in report.findings if finding.kind == "number format"]
    assert "trainer.bf16=false leaves" in finding.text
    assert "generator.model_dtype" not in finding.text


def test_tokens_outside_clip_range_are_counted(sharp_model: str):
    """bfloat16 rounds by 0.006 on average: that leaves a clip range of 0.01 often, and one of 0.2 never."""
    wide = report_on(sharp_model, NativeInferenceEngine(sharp_model, dtype="bfloat16"))
    assert "outliers" not in kinds(wide)
    report = report_on(sharp_model, NativeInferenceEngine(sharp_model, dtype="bfloat16"), clip=0.01)
    [cell] = report.engines[0].cells
    gap = report.gap(cell)
    assert gap is not None
    [finding] = [finding for finding in report.findings if finding.kind == "outliers"]
    assert 0.05 < gap.outside_clip < 0.5
    assert "off by more than 0.01 " in finding.text
    assert f"native bfloat16, temperature 1: one token in {1 / gap.outside_clip:.0f} (" in finding.text


def test_non_finite_values_are_errors_and_rest_is_measured(sharp_model: str):
    """Every answer's last log-prob is NaN, as where float16 overflows."""
    report = report_on(sharp_model, AltersLogProbs(sharp_model, lambda row: [*row[:-1], float("nan")]))
    assert kinds(report) == ["not finite"]
    [cell] = report.engines[0].cells
    gap = report.gap(cell)
    assert cell.num_not_finite == len(cell.answers.responses)
    assert gap is not None
    assert gap.mean < 1e-5
    assert report.above(1.0) == [cell]
