"""The conformance kit finds engines that are wrong: in each story the native engine is broken in one place."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.inference_engines.base import EngineInfo, InferenceEngineInput, InferenceEngineOutput
from skyrl_train.inference_engines.native import core, engine, packed_linear, weights
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.rows import RowTable
from skyrl_train.inference_engines.native.sampling import Draw, SamplingBatch, apply_repetition_penalty, truncate
from skyrl_train.inference_engines.native.weights import EngineWeights
from skyrl_train.weight_sync.base import WeightReport
from skyrl_train_testing.engine_conformance import (
    CHECKS,
    ConformanceError,
    EngineUnderTest,
    check_engine,
    control,
    make_tiny_model,
    run_check,
)

CHECK_OF = {check.name: check for check in CHECKS}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), tied=True)


@pytest.fixture(autouse=True)
def packs_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small, so that it shows where they are not packed anew."""
    monkeypatch.setattr(packed_linear, "SMALLEST", 0)


async def outcome_of(path: str, name: str, make: Callable[..., NativeInferenceEngine] = NativeInferenceEngine):
    """Run one check on an engine of its own."""
    under_test = make(path)
    subject = EngineUnderTest(under_test, path, timeout_seconds=60)
    try:
        return await run_check(CHECK_OF[name], subject)
    finally:
        await subject.close()
        await under_test.teardown()


# ---- what is drawn, and what is said of it

sample = core.sample


def truncated(logits: torch.Tensor, batch: SamplingBatch, uniform: Any, **more: Any):
    tokens, *_ = sample(logits, batch, uniform, **more)
    kept = truncate((logits / batch.temperature.clamp(min=0.01)[:, None]).softmax(-1), batch)
    return Draw(tokens, (kept / kept.sum(-1, keepdim=True)).gather(1, tokens[:, None])[:, 0].log(), None)


def at_temperature_one(logits: torch.Tensor, batch: SamplingBatch, uniform: Any, **more: Any):
    tokens, *_ = sample(logits, batch, uniform, **more)
    return Draw(tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], None)


def drawn_at_temperature_one(logits: torch.Tensor, batch: SamplingBatch, uniform: Any, **more: Any):
    tokens, *_ = sample(logits, replace(batch, temperature=torch.ones_like(batch.temperature)), uniform, **more)
    scaled = (logits / batch.temperature[:, None]).log_softmax(-1)
    return Draw(tokens, scaled.gather(1, tokens[:, None])[:, 0], None)


def penalized(logits: torch.Tensor, batch: SamplingBatch, uniform: Any, *, tokens: torch.Tensor | None, **more: Any):
    chosen, log_probs, *_ = sample(logits, batch, uniform, tokens=tokens, **more)
    if batch.repetition_penalty is not None:
        assert tokens is not None
        adjusted = apply_repetition_penalty(logits, tokens, batch.repetition_penalty)
        log_probs = adjusted.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    return Draw(chosen, log_probs, None)


@pytest.mark.parametrize(
    "fault, check, says",
    [
        (truncated, "check_log_probs_before_truncation", "top_k=3"),
        (at_temperature_one, "check_log_probs", "those at temperature 1"),
        (drawn_at_temperature_one, "check_sampling_distribution", "do not look like the distribution"),
        (penalized, "check_repetition_penalty", "with a repetition penalty: the log"),
    ],
)
async def test_wrong_draws_and_log_probs_are_named(tiny, monkeypatch, fault, check, says):
    def planted(path: str) -> NativeInferenceEngine:
        engine = NativeInferenceEngine(path)
        monkeypatch.setattr(core, "sample", fault)  # after loading, which tries the model and would refuse it
        return engine

    with pytest.raises(ConformanceError, match=says):
        await outcome_of(tiny, check, planted)


def answers(change: Callable[[Any, dict[str, Any], Any], dict[str, Any]]) -> type[NativeInferenceEngine]:
    """An engine with other columns in its answers: those that `change(engine, sampling parameters, answer)` returns."""

    class Answers(NativeInferenceEngine):
        async def generate_batch(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
            output: Any = await super().generate_batch(input_batch)
            if output["response_ids"]:
                output.update(change(self, dict(input_batch.get("sampling_params") or {}), output))
            return output

    return Answers


def asks(change: Callable[[Any, Any], dict[str, Any]]) -> type[NativeInferenceEngine]:
    """An engine that is asked something else: what `change(engine, request)` returns."""

    class Asks(NativeInferenceEngine):
        async def generate_batch(self, input_batch: Any) -> InferenceEngineOutput:
            return await super().generate_batch({**input_batch, **change(self, input_batch)})

    return Asks


def pauses(change: Callable[[str], Any]) -> type[NativeInferenceEngine]:
    """An engine that pauses in another mode; None: not at all."""

    class Pauses(NativeInferenceEngine):
        async def pause_generation(self, mode="keep"):
            if other := change(mode):
                await super().pause_generation(other)

    return Pauses


def columns(output: Any, keep: Callable[[int], slice]) -> dict[str, Any]:
    """Every completion, shortened."""
    names = ("response_ids", "response_logprobs", "weight_versions")
    return {name: [row[keep(len(row))] for row in output[name]] for name in names}


def without_stop_strings(engine, asked, output):
    stops = asked.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    return {"responses": [reduce(str.removesuffix, stops, text) for text in output["responses"]]}


def without_stop_token(engine, asked, output):
    if output["stop_reasons"] != ["stop"]:
        return {}
    shorter = columns(output, lambda length: slice(length - 1))
    return shorter | {"responses": [engine._decode(shorter["response_ids"][0])]}


def without_what_was_written(engine, asked, output):
    if "abort" not in output["stop_reasons"]:
        return {}
    return columns(output, lambda _length: slice(0)) | {"responses": [""] * len(output["responses"])}


def without_last_token(engine, asked, output):
    return columns(output, lambda length: slice(length - 1)) if output["stop_reasons"] == ["length"] else {}


def with_shifted_prompt_log_probs(engine, asked, output):
    rows = output.get("prompt_logprobs")
    return {"prompt_logprobs": [row[1:] + row[:1] for row in rows]} if rows else {}


def without_adapter_where_prompts_are_scored(engine, batch):
    return {"lora_name": None} if "prompt_logprobs" in batch["sampling_params"] else {}


def without_keyword(name: str) -> type[NativeInferenceEngine]:
    def change(engine, batch):
        return {"sampling_params": {key: value for key, value in batch["sampling_params"].items() if key != name}}

    return asks(change)


def with_prompts_that_fit(engine, batch):
    """Prompts are truncated instead of refused."""
    most = engine._core.max_model_len - 10
    return {"prompt_token_ids": [(prompt or [2])[-most:] for prompt in batch["prompt_token_ids"]]}


CutsTheStopString = answers(without_stop_strings)
DropsTheStopToken = answers(without_stop_token)
TellsOneVersionAnAnswer = answers(
    lambda engine, asked, output: {"weight_versions": [row[-1:] * len(row) for row in output["weight_versions"]]}
)
ForgetsWhatWasWritten = answers(without_what_was_written)
ForgetsTheLastVersion = answers(
    lambda engine, asked, output: {"weight_versions": [row[:-1] for row in output["weight_versions"]]}
)
GivesEmptyLogProbs = answers(lambda engine, asked, output: {"response_logprobs": output["response_logprobs"] or []})
StopsOneTokenEarly = answers(without_last_token)
ShiftsPromptLogProbs = answers(with_shifted_prompt_log_probs)
SaysLengthForStop = answers(lambda engine, asked, output: {"stop_reasons": ["length"] * len(output["stop_reasons"])})
IgnoresAdapters = asks(lambda engine, batch: {"lora_name": None})
ScoresPromptsWithoutAdapters = asks(without_adapter_where_prompts_are_scored)
TakesAnyToken = asks(
    lambda engine, batch: {"prompt_token_ids": [[token % 64 for token in ids] for ids in batch["prompt_token_ids"]]}
)
MakesPromptsFit = asks(with_prompts_that_fit)
SkipsSamplingKeywords = without_keyword("temperatur")
SkipsMinTokens = without_keyword("min_tokens")
WritesOnInAPause = pauses(lambda mode: None if mode == "keep" else mode)
DoesNotWait = pauses(lambda mode: "keep" if mode == "wait" else mode)
ShrugsAtUnknownModes = pauses(lambda mode: mode if mode in ("keep", "wait", "abort") else "keep")


class AnswersInAPause(NativeInferenceEngine):
    async def pause_generation(self, mode="keep"):
        await super().pause_generation(mode)
        self._pause = None


class SleepsWhileRequestsRun(NativeInferenceEngine):
    async def sleep(self, level=1):
        await self.abort_generation()
        await super().sleep(level)


class SharesPromptsOfOlderWeights(NativeInferenceEngine):
    async def finish_weight_update(self, version: int) -> WeightReport:
        clear, self._core.clear_prefixes = self._core.clear_prefixes, lambda: None
        try:
            return await super().finish_weight_update(version)
        finally:
            self._core.clear_prefixes = clear


class SeedsByArrival(NativeInferenceEngine):
    def _parse_sampling(self, given):
        params, _ = super()._parse_sampling(given)
        self._num_unseeded += 1
        return params, (0, self._num_unseeded)


class OneSeedForAll(NativeInferenceEngine):
    def _parse_sampling(self, given):
        return super()._parse_sampling(given)[0], (0, 0)


class ForgetsAdaptersAtUpdates(NativeInferenceEngine):
    async def finish_weight_update(self, version: int) -> WeightReport:
        await self.unload_lora("kept")
        return await super().finish_weight_update(version)


class LoadsNothing(NativeInferenceEngine):
    async def load_lora(self, request):
        return WeightReport(version=request.version, fingerprints={})


class SleepsBadly(NativeInferenceEngine):
    async def wake_up(self, tags=None):
        await super().wake_up(tags)
        self._core.model.get_parameter("model.norm.weight").mul_(1.5)


class IsIllAtWork(NativeInferenceEngine):
    async def check_health(self):
        if self._core.num_running:
            raise engine.WorkerError("busy")


class LosesTheKept(NativeInferenceEngine):
    async def resume_generation(self):
        await self.abort_generation()
        await super().resume_generation()


class Survives(NativeInferenceEngine):
    async def teardown(self):
        await self.abort_generation()


class NeverLetsGo(NativeInferenceEngine):
    """Does not answer once it is paused."""

    async def resume_generation(self) -> None:
        await asyncio.sleep(3600)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "make, check, says",
    [
        (CutsTheStopString, "check_stop_strings", "must stay in the answer"),
        (DropsTheStopToken, "check_stop_tokens", "expected .* by 'stop', got"),
        (SaysLengthForStop, "check_end_of_sequence", "ended by 'length' with the tok"),
        (ShiftsPromptLogProbs, "check_prompt_log_probs", "the prompt of 2|the prompt of 17"),
        (IgnoresAdapters, "check_concurrent_adapters", "those without the adapter"),
        (TakesAnyToken, "check_prompt_outside_vocabulary", "must raise ValueError; got an answer"),
        (ForgetsTheLastVersion, "check_response_fields", "30 log-probs and 29 weight vers"),
        (GivesEmptyLogProbs, "check_omitted_log_probs", "response_logprobs"),
        (StopsOneTokenEarly, "check_max_tokens", "must give"),
        (StopsOneTokenEarly, "check_context_limit", "5 tokens fit behind the prompt"),
        (OneSeedForAll, "check_samples_differ", "six samples"),
        (MakesPromptsFit, "check_empty_prompt", "must raise ValueError; got an answer"),
        (MakesPromptsFit, "check_prompt_over_context", "must raise ValueError; got an answer"),
        (SkipsSamplingKeywords, "check_sampling_keywords", "'temperatur': 1.0.* must raise ValueError; got"),
        (IgnoresAdapters, "check_unknown_adapter", "'nobody'.* must raise ValueError; got an answer"),
        (SkipsMinTokens, "check_min_tokens", "min_tokens"),
        (ScoresPromptsWithoutAdapters, "check_prompt_log_probs_with_adapters", "those without the adapter"),
        (ForgetsAdaptersAtUpdates, "check_adapters_over_updated_weights", "kept"),
        (LoadsNothing, "check_folder_without_adapter", "must raise Exception; got an answer"),
        (SleepsBadly, "check_sleep", "the log-prob of token|answers are others"),
        (ShrugsAtUnknownModes, "check_control_arguments", "must raise ValueError"),
        (SeedsByArrival, "check_seeds", "the same seed gave"),
    ],
)
async def test_wrong_answers_are_named(tiny, make, check, says):
    with pytest.raises(ConformanceError, match=says):
        await outcome_of(tiny, check, make)


@pytest.mark.slow
async def test_engine_outliving_shutdown_is_named(tiny):
    survivor = Survives(tiny)
    subject = EngineUnderTest(survivor, tiny)
    with pytest.raises(ConformanceError, match="must raise SkyRLError"):
        await run_check(CHECK_OF["check_teardown"], subject)
    await subject.close()
    await NativeInferenceEngine.teardown(survivor)


@pytest.mark.slow
async def test_engine_dropping_requests_on_cancellation_is_named(tiny, monkeypatch):
    abort = core.NativeEngineCore.abort
    monkeypatch.setattr(core.NativeEngineCore, "abort", lambda self, requests=None: abort(self))
    with pytest.raises(ConformanceError, match=r"a request beside a cancelled one ended by .'abort'"):
        await outcome_of(tiny, "check_cancelled_caller")


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize(
    "make, check, says",
    [
        (ForgetsWhatWasWritten, "check_abort", "caught under way; .* 'abort' after 0 tokens"),
        (WritesOnInAPause, "check_pause_keep_stops", "was finished during pause|it went on writing"),
        (IsIllAtWork, "check_health", "WorkerError: busy"),
        (DoesNotWait, "check_pause_wait", "returned while a request was running"),
        (LosesTheKept, "check_pause_keep_changes_nothing", "waited for the resume ended by .*'abort'"),
        (AnswersInAPause, "check_pause_abort", "answered before resume_generation"),
        (SleepsWhileRequestsRun, "check_sleep_during_requests", "did not raise while requests were running"),
        (TellsOneVersionAnAnswer, "check_update_during_responses", "caught under way|written before"),
        (
            SharesPromptsOfOlderWeights,
            "check_prefix_cache_after_update",
            "those over keys of the older weights",
        ),
    ],
)
async def test_wrong_control_is_named(tiny, monkeypatch, make, check, says):
    if "caught under way" in says:  # it never is: a few tries tell as much as all
        monkeypatch.setattr(control, "_NUM_TRIES", 4)
    with pytest.raises(ConformanceError, match=says):
        await outcome_of(tiny, check, make)


# ---- weights


def without_packing(monkeypatch):
    """Linear layers compute with the copies of before."""
    monkeypatch.setattr(weights, "pack_linears", lambda _model: None)
    monkeypatch.setattr(weights, "drop_packed", lambda _model: None)


def without_one_tensor(monkeypatch):
    """One tensor is received and not written."""
    update = EngineWeights.update

    def skipping(self, request):
        kept = self._parameters["model.norm.weight"].clone()
        update(self, request)
        self._parameters["model.norm.weight"].copy_(kept)

    monkeypatch.setattr(EngineWeights, "update", skipping)


def half_updates_go_on(monkeypatch):
    """Make the engine continue with the received part of a failed update."""

    def give_up(self, why):
        self._written.clear()
        self._update_deadline = None

    monkeypatch.setattr(EngineWeights, "_cancel_update", give_up)


def repeated_buckets_are_taken(monkeypatch):
    monkeypatch.setattr(weights.WeightReceiver, "_check_order", lambda *_: None)
    monkeypatch.setattr(weights.WeightReceiver, "finish", lambda *_: None)


def keys_are_not_checked(monkeypatch):
    """Buckets may be lost: neither the receiver nor the report say so."""
    repeated_buckets_are_taken(monkeypatch)
    monkeypatch.setattr(weights, "fingerprints_of", lambda held, *_: {name: 0 for name, _ in held})


def unknown_names_are_skipped(monkeypatch):
    receive = weights.WeightReceiver.receive
    monkeypatch.setattr(
        weights.WeightReceiver,
        "receive",
        lambda self, request: [pair for pair in receive(self, request) if "typo" not in pair[0]],
    )


def version_is_forgotten(monkeypatch):
    """Tokens keep the version of before."""
    append = RowTable.append
    monkeypatch.setattr(RowTable, "append", lambda self, *args: append(self, *args[:-1], args[-1] * 0))


@pytest.mark.parametrize(
    "plant, check, says",
    [
        (without_packing, "check_update", "WeightSyncError.*computes with other numbers"),
        (without_one_tensor, "check_update", "WeightSyncError.*model.norm.weight"),
        (version_is_forgotten, "check_update", r"tokens have weight versions \{0\} in place of 1"),
        (half_updates_go_on, "check_lost_bucket", r"old version \d after a lost bucket: the log-prob"),
        (without_packing, "check_small_updates", "WeightSyncError.*computes with other numbers"),
        (without_packing, "check_deep_sleep", "raised|the log-prob of token"),
        (
            repeated_buckets_are_taken,
            "check_repeated_bucket",
            "must raise WeightSyncError; got an answer",
        ),
        (repeated_buckets_are_taken, "check_weights_without_connection", "must raise WeightSyncError; got an"),
        (unknown_names_are_skipped, "check_unknown_tensor", "the error must name model.typo.weight"),
        (keys_are_not_checked, "check_update", "WeightSyncError"),
    ],
)
async def test_wrong_weights_are_named(tiny, monkeypatch, plant, check, says):
    plant(monkeypatch)
    with pytest.raises(ConformanceError, match=says):
        await outcome_of(tiny, check)


# ---- the kit itself


class WithoutSeeds(NativeInferenceEngine):
    async def describe(self) -> EngineInfo:
        return replace(await super().describe(), unsupported={"seed": "it has no random generator"})


async def test_engine_must_refuse_unsupported_feature(tiny):
    class Refusing(WithoutSeeds):
        async def generate(self, request):
            if "seed" in request.sampling_params:
                raise engine.UnsupportedByEngine("it has no random generator")
            return await super().generate(request)

    name = "check_seeds"
    outcome = await outcome_of(tiny, name, Refusing)
    assert (outcome.result, outcome.words) == ("lacks", "seed: it has no random generator")
    with pytest.raises(ConformanceError, match="seed must raise UnsupportedByEngine"):
        await outcome_of(tiny, name, WithoutSeeds)
    other = await outcome_of(tiny, "check_samples_differ", Refusing)  # asks for no seed then
    assert other.result == "passed"


async def test_report_has_line_per_check_and_all_failures(tiny):
    broken = SaysLengthForStop(tiny)
    names = ["check_max_tokens", "check_end_of_sequence"]
    report = await check_engine(EngineUnderTest(broken, tiny), [CHECK_OF[name] for name in names])
    await broken.teardown()
    lines = str(report).splitlines()
    assert lines[0].startswith("native ") and lines[0].endswith(", float32: 1 passed, 0 lacking, 1 failed")
    assert lines[1].startswith(" passed") and names[0] in lines[1]
    assert lines[2].startswith(" failed") and names[1] in lines[2]
    assert "The rule: The model's end-of-sequence token ends an answer" in str(report)
    with pytest.raises(ConformanceError, match=names[1]):
        report.raise_if_broken()


async def test_hanging_engine_is_finding(tiny):
    hanging = NeverLetsGo(tiny)
    subject = EngineUnderTest(hanging, tiny, timeout_seconds=2)
    with pytest.raises(ConformanceError, match="2 seconds"):
        await run_check(CHECK_OF["check_pause_abort"], subject)
    await subject.close()
    await hanging.teardown()


async def test_failed_check_leaves_engine_usable(tiny, monkeypatch):
    """Weights, pauses and requests of a check that failed do not disturb the next one."""
    native = NativeInferenceEngine(tiny)
    subject = EngineUnderTest(native, tiny)
    with monkeypatch.context() as planted:
        without_packing(planted)
        with pytest.raises(ConformanceError):
            await run_check(CHECK_OF["check_update"], subject)
    for name in ("check_update", "check_greedy_tokens"):
        assert (await run_check(CHECK_OF[name], subject)).result == "passed"
    await subject.close()
    await native.teardown()


def test_tiny_model_responses_do_not_depend_on_rounding(tiny):
    """The likeliest token is ahead of the next one by much more than rounding, at nearly all places."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    ids = torch.from_numpy(np.random.default_rng(0).integers(2, 64, (8, 64)))
    with torch.no_grad():
        best = model(ids).logits.topk(2).values
    assert ((best[..., 0] - best[..., 1]) > 1e-3).float().mean() > 0.98
