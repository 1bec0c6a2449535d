"""Run with a vLLM server on loopback: weights from another process, adapters that replace each other, and what every
engine keeps."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest
import pytest_asyncio
import torch
from pydantic import SecretStr
from server_process import KEY
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.errors import ConfigError, UnsupportedByEngine
from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.remote.check import check_server
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine
from skyrl_train.inference_engines.server_child import ServerChild
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train_testing.engine_conformance import CHECKS, Check, EngineUnderTest, Reference, make_tiny_model, run_check
from skyrl_train_testing.weight_sources import RanksInThreads, TensorSource

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PROMPT = [5, 9, 13, 20]
WAYS = (("shared_memory", "full"), ("broadcast", "full"), ("checkpoint", "full"), ("shared_memory", "delta"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm: ServerChild, served_model: str) -> AsyncIterator[RemoteInferenceEngine]:
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    engine = RemoteInferenceEngine(
        f"127.0.0.1:{vllm.port}",
        served_model,
        tokenizer=tokenizer,
        request_timeout_seconds=240,
        control_timeout_seconds=120,
        api_key=SecretStr(KEY),
    )
    yield engine
    await engine.teardown()


async def test_server_reports_engine_info(engine: RemoteInferenceEngine, served_model: str) -> None:
    info = await engine.describe()
    assert (info.backend, info.model, info.vocab_size, info.max_model_len, info.dtype, info.num_weight_processes) == (
        "vllm",
        served_model,
        64,
        1024,
        "float32",
        1,
    )
    assert set(info.unsupported) == {"sleep", "answer_tokens", "streaming"}
    with pytest.raises(UnsupportedByEngine, match="--enable-sleep-mode"):
        await engine.sleep()


async def test_server_rejects_requests_without_key(vllm: ServerChild, served_model: str) -> None:
    """Runs first of all that load the server; the other tests show that the key opens it."""
    calls = [("/collective_rpc", {"method": "list_loras"}), ("/sleep", {}), ("/pause", {}), ("/v1/completions", {})]
    async with httpx.AsyncClient(base_url=vllm.url) as stranger:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            for path, body in calls:
                assert (await stranger.post(path, json=body, headers=headers)).status_code == 401
        assert (await stranger.get("/health")).status_code == 200
    with pytest.raises(ConfigError, match=r"generator\.remote_inference_engine_api_key_file"):
        RemoteInferenceEngine(vllm.url, served_model)
    [served] = psutil.Process(vllm.pid).children()  # of the guard
    [listening] = {c.laddr.ip for c in served.net_connections() if c.laddr.port == vllm.port}
    assert listening == "127.0.0.1"
    assert KEY not in vllm.log_file.read_text()
    assert not any(KEY in word for word in served.cmdline())


async def test_check_accepts_served_model_and_rejects_other(
    engine: RemoteInferenceEngine, served_model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    check_server(engine, tokenizer)
    other = make_tiny_model(tmp_path_factory.mktemp("other") / "small", tied=False)
    stranger = RemoteInferenceEngine(engine.url, other, tokenizer=tokenizer, api_key=engine.api_key)
    with pytest.raises(ConfigError, match=f"{served_model}; generator.model_name is {other}"):
        check_server(stranger, tokenizer)
    await stranger.teardown()


async def test_weights_are_sent_while_request_waits(engine: RemoteInferenceEngine, served_model: str) -> None:
    """New weights, and the original ones again."""
    reference = Reference(served_model, torch.float32)
    infos = init_infos_for([Route("shared_memory")], [await engine.describe()])
    source = TensorSource(max_bucket_bytes=1 << 16)
    sender = WeightSender(RanksInThreads([source]), [engine], infos)
    await sender.connect()
    version = await engine.weight_version()
    for weights in (reference.changed(seed=3), reference.original):
        version += 1
        await engine.pause_generation("keep")
        asked = asyncio.ensure_future(
            engine.generate_batch(
                InferenceEngineInput(
                    prompt_token_ids=[PROMPT], sampling_params={"max_tokens": 8, "ignore_eos": True, "seed": 1}
                )
            )
        )
        source.tensors = weights.items()
        result = await sender.send(version)
        assert result.reports[0].version == version
        assert not asked.done()
        await engine.resume_generation()
        output = await asked
        assert output["weight_versions"] == [[version] * 8]
        assert output["response_logprobs"] is not None
        with reference.holding(weights):
            expected = reference.log_probs(PROMPT, output["response_ids"][0])
        torch.testing.assert_close(torch.tensor(output["response_logprobs"][0]), expected, atol=2e-4, rtol=0)
    source.close()


async def test_engine_object_in_other_process_uses_newest_adapter(
    engine: RemoteInferenceEngine, served_model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Loaded through one engine object, used through another one that has seen an older version."""
    from peft import LoraConfig, get_peft_model

    from skyrl_train.weight_sync.base import LoraLoadRequest

    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(served_model), config)
        folders.append(str(tmp_path_factory.mktemp("adapter")))
        adapted.save_pretrained(folders[-1])
    other = RemoteInferenceEngine(engine.url, served_model, control_timeout_seconds=120, api_key=engine.api_key)
    asked = InferenceEngineInput(prompt_token_ids=[PROMPT], sampling_params={"max_tokens": 3}, lora_name="policy")
    report = await other.load_lora(LoraLoadRequest(name="policy", path=folders[0], version=7))
    assert len(report.fingerprints) == 4  # A and B of two layers, as vLLM holds them
    versions = (await engine.generate_batch(asked))["weight_versions"][0]
    await other.load_lora(LoraLoadRequest(name="policy", path=folders[1], version=8))
    versions += (await engine.generate_batch(asked))["weight_versions"][0]
    assert set(versions) == {7, 8}
    await other.unload_lora("policy")
    with pytest.raises(ValueError, match="'policy'"):
        await engine.generate_batch(asked)
    await other.teardown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(engine: RemoteInferenceEngine, served_model: str) -> AsyncIterator[EngineUnderTest]:
    subject = EngineUnderTest(engine, served_model, ways=WAYS)
    yield subject
    await subject.close()


async def test_request_received_after_pause_is_aborted(
    subject: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = subject.engine._protocol  # pyright: ignore[reportAttributeAccessIssue]
    complete = protocol.complete

    async def slow_way(*request):
        await asyncio.sleep(0.3)
        return await complete(*request)

    await subject.prepare()
    monkeypatch.setattr(protocol, "complete", slow_way)
    late = subject.begin([subject.prompt(4)], max_tokens=3, ignore_eos=True)
    await asyncio.sleep(0.1)  # it is on its way
    await subject.in_time(subject.engine.pause_generation("abort"))
    assert (await subject.in_time(late, 5))["stop_reasons"] == ["abort"]
    await subject.engine.resume_generation()
    assert (await subject.generate([subject.prompt(4)], max_tokens=3, ignore_eos=True))["stop_reasons"] == ["length"]


PASSED_ON = {
    "check_response_fields",
    "check_log_probs",
    "check_seeds",
    "check_top_prompt_log_probs",
    "check_stop_strings",
    "check_sampling_keywords",
    "check_pause_wait",
    "check_update",
    "check_lost_bucket",
    "check_prefix_cache_after_update",
}
"""Checks that show that fields of requests and responses, weights and control calls pass the server. What vLLM computes
is checked in `test_vllm_conformance.py`."""


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=check.name, marks=[pytest.mark.full] * (check.name not in PASSED_ON)) for check in CHECKS],
)
async def test_server_conforms_to_engine_contract(check: Check, subject: EngineUnderTest) -> None:
    # The last check ends the engine's life.
    outcome = await run_check(check, subject)
    if outcome.result == "lacks":
        pytest.skip(outcome.words)
