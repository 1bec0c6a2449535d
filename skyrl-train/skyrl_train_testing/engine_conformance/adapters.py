"""Low-rank adapters: loaded from a folder, used by name next to the base model, replaced, unloaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from skyrl_train.inference_engines.base import InferenceEngineOutput
from skyrl_train.weight_sync.base import LoraLoadRequest
from skyrl_train_testing.engine_conformance.reference import Weights
from skyrl_train_testing.engine_conformance.registry import check, check_close, check_raises, expect
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest


class _Adapter:
    """Random low-rank changes, as peft writes them, and the model with them."""

    def __init__(self, subject: EngineUnderTest, folder: Path, seed: int):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=subject.lora_rank,
            lora_alpha=2 * subject.lora_rank,
            target_modules=list(subject.lora_targets),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model: Any = get_peft_model(deepcopy(subject.reference.model), config).eval()
            for name, parameter in self._model.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(std=0.1)
                if "lora_" in name:
                    parameter.data = parameter.data.to(subject.reference.dtype).float()
        self._model.save_pretrained(str(folder))
        self.path = str(folder)

    @contextmanager
    def in_place(self, subject: EngineUnderTest) -> Iterator[None]:
        """The reference computes with the adapter."""
        plain = subject.reference.model
        subject.reference.model = self._model
        try:
            yield
        finally:
            subject.reference.model = plain

    def take(self, weights: Weights) -> None:
        """Other weights below the adapter."""
        with torch.no_grad():
            for name, parameter in self._model.get_base_model().named_parameters():
                plain = name.replace(".base_layer", "")
                if plain in weights:
                    parameter.copy_(weights[plain])


_PARAMS = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0}


def _make_prompts(subject: EngineUnderTest) -> list[list[int]]:
    return [subject.prompt(20, seed=1), subject.prompt(6, seed=2)]


def _check_own_log_probs(
    subject: EngineUnderTest, output: InferenceEngineOutput, adapter: _Adapter | None, version: int, what: str
) -> None:
    """Check that log-probs equal the model with this adapter (None: the base model) and tokens have this version."""
    log_probs = output["response_logprobs"]
    assert log_probs is not None
    for row, prompt in enumerate(_make_prompts(subject)):
        ids = output["response_ids"][row]
        plain = subject.reference.log_probs(prompt, ids)
        expected, others = plain, {}
        if adapter is not None:
            with adapter.in_place(subject):
                expected = subject.reference.log_probs(prompt, ids)
            others = {"those without the adapter": plain}
        check_close(f"{what}, prompt {row}", log_probs[row], expected, subject.tolerance, others)
        found = set(output["weight_versions"][row])
        expect(found == {version}, f"{what}: tokens have weight versions {found} in place of {version}")


async def _load(subject: EngineUnderTest, name: str, adapter: _Adapter, version: int) -> None:
    request = LoraLoadRequest(name=name, path=adapter.path, version=version)
    report = await subject.in_time(subject.engine.load_lora(request))
    expect(report.version == version, f"loading adapter {name!r} as version {version} reported {report.version}")


@check("lora")
async def check_concurrent_adapters(subject: EngineUnderTest) -> None:
    """Requests with an adapter use it, concurrently with requests for the base model or other adapters; loading a known
    name replaces it; unloading removes it.
    """
    first, second = (_Adapter(subject, subject.directory / f"adapter_{seed}", seed) for seed in (1, 2))
    prompts, base = _make_prompts(subject), subject.version
    await _load(subject, "one", first, base + 1)
    try:
        plain = subject.begin(prompts, **_PARAMS)
        adapted = subject.begin(prompts, lora="one", **_PARAMS)
        _check_own_log_probs(subject, await plain, None, base, "beside an adapter")
        _check_own_log_probs(subject, await adapted, first, base + 1, "with an adapter")
        await _load(subject, "one", second, base + 2)
        output = await subject.generate(prompts, lora="one", **_PARAMS)
        _check_own_log_probs(subject, output, second, base + 2, "with an adapter in place of another")
        _check_own_log_probs(subject, await subject.generate(prompts, **_PARAMS), None, base, "without, after both")
    finally:
        await subject.in_time(subject.engine.unload_lora("one"))
    await check_raises(
        ValueError, subject.generate(prompts, lora="one", **_PARAMS), "an unloaded adapter", names=["one"]
    )
    await check_raises(
        ValueError, subject.in_time(subject.engine.unload_lora("one")), "unloading what is not loaded", names=["one"]
    )
    _check_own_log_probs(subject, await subject.generate(prompts, **_PARAMS), None, base, "after unloading")


@check("lora", "weight_update")
async def check_adapters_over_updated_weights(subject: EngineUnderTest) -> None:
    """An update of the model's weights leaves adapters loaded: their requests get the new weights with the adapter."""
    adapter = _Adapter(subject, subject.directory / "adapter_over_new", 3)
    weights, prompts = subject.reference.changed(seed=40), _make_prompts(subject)
    await _load(subject, "kept", adapter, subject.version + 1)
    loaded = subject.version + 1
    try:
        await subject.set_weights(weights)
        plain = subject.begin(prompts, **_PARAMS)
        adapted = subject.begin(prompts, lora="kept", **_PARAMS)
        adapter.take(weights)
        with subject.reference.holding(weights):
            _check_own_log_probs(subject, await plain, None, subject.version, "new weights beside an adapter")
            _check_own_log_probs(subject, await adapted, adapter, loaded, "an adapter over new weights")
    finally:
        await subject.in_time(subject.engine.unload_lora("kept"))


@check("lora", "prompt_log_probs")
async def check_prompt_log_probs_with_adapters(subject: EngineUnderTest) -> None:
    """A request that names an adapter gets its prompt's log-probs from the model with it."""
    adapter = _Adapter(subject, subject.directory / "adapter_of_prompts", 4)
    [prompt, _] = _make_prompts(subject)
    await subject.generate([prompt], max_tokens=2)  # whatever caches prompts has it now, without the adapter
    await _load(subject, "reader", adapter, 1)
    try:
        output = await subject.generate([prompt], lora="reader", max_tokens=2, prompt_logprobs=0)
    finally:
        await subject.in_time(subject.engine.unload_lora("reader"))
    plain = subject.reference.prompt_log_probs(prompt)
    with adapter.in_place(subject):
        expected = subject.reference.prompt_log_probs(prompt)
    [found] = output.get("prompt_logprobs") or [[]]
    check_close("the prompt", found, expected, subject.tolerance, {"those without the adapter": plain})


@check("lora")
async def check_folder_without_adapter(subject: EngineUnderTest) -> None:
    """Loading a folder without an adapter raises an error that names the folder, and the engine stays usable."""
    folder = subject.directory / "no_adapter_here"
    folder.mkdir(exist_ok=True)
    request = LoraLoadRequest(name="none", path=str(folder), version=1)
    await check_raises(
        Exception, subject.in_time(subject.engine.load_lora(request)), "an empty folder", names=[folder.name]
    )
    output = await subject.generate(_make_prompts(subject), **_PARAMS)
    _check_own_log_probs(subject, output, None, subject.version, "after a failed load")
