"""The client over two real engines: who gets what, in which order, and that splitting a batch changes nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import RolloutError, WeightSyncError, WorkerError
from skyrl_train.inference_engines import request_runner
from skyrl_train.inference_engines.base import (
    Completion,
    EngineInfo,
    GenerationRequest,
    InferenceEngineInput,
)
from skyrl_train.inference_engines.constraints import ConstraintFailed
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient, _get_common_report
from skyrl_train.inference_engines.native.constrained import AnswerMatcher
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.weight_sync.base import WeightReport

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [5, 6, 7], [20]]
PARAMS = {"max_tokens": 6, "temperature": 1.0, "seed": 11, "logprobs": 0, "ignore_eos": True}
LONG = PARAMS | {"max_tokens": 120}


class Watched(NativeInferenceEngine):
    """A native engine that counts what it got."""

    num_requests = 0
    most_at_a_time = 0
    _now = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.num_requests += 1
        self._now += 1
        self.most_at_a_time = max(self.most_at_a_time, self._now)
        try:
            return await super().generate(request)
        finally:
            self._now -= 1


MakeClient = Callable[..., InferenceEngineClient]


@pytest.fixture
async def make_client(chat_model: str) -> AsyncIterator[MakeClient]:
    """`make_client(**settings)`: over two engines, which are started again when they end."""
    made: list[InferenceEngineClient] = []
    tokenizer = AutoTokenizer.from_pretrained(chat_model)

    def make(num_speculative_tokens: int = 0, **settings: Any) -> InferenceEngineClient:
        def start() -> Watched:
            return Watched(chat_model, num_speculative_tokens=num_speculative_tokens)

        async def restart(_: int) -> Watched:
            return start()

        cfg = SkyRLConfig.from_dict({"generator": settings})
        made.append(InferenceEngineClient([start(), start()], tokenizer, cfg, restart))
        return made[-1]

    yield make
    for client in made:
        await client.teardown()


@pytest.fixture
def client(make_client: MakeClient) -> InferenceEngineClient:
    return make_client()


@pytest.fixture
def engines(client: InferenceEngineClient) -> list[Any]:
    return client.engines


def batch(prompts: list[list[int]] = PROMPTS, params: dict[str, Any] = PARAMS, **more: Any) -> InferenceEngineInput:
    return InferenceEngineInput(prompt_token_ids=prompts, sampling_params=params, **more)


def counts(client: InferenceEngineClient) -> dict[str, float]:
    """Metrics but for those of prompts."""
    return {name: value for name, value in client.take_metrics().items() if "pr" not in name}


async def under_way(client: InferenceEngineClient, num: int) -> None:
    """Waits until so many requests have written a few tokens."""
    async with asyncio.timeout(30):
        while sum(engine._core.num_running for engine in client.engines) < num:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)


async def test_split_batch_equals_single_engine_output(client, engines):
    alone = await engines[0].generate_batch(batch())
    before = [engine.num_requests for engine in engines]
    split = await client.generate_batch(batch())
    taken = [engine.num_requests - count for engine, count in zip(engines, before, strict=True)]
    assert sorted(taken) == [2, 3]
    assert split == alone


async def test_batch_is_divided_evenly_over_engines(client, engines):
    output = await client.generate_batch(batch([[5, 6]] * 64))
    assert len(output["response_ids"]) == 64
    assert [engine.num_requests for engine in engines] == [32, 32]


async def test_empty_batch_returns_empty_output(client, engines):
    assert (await client.generate_batch(batch([])))["response_ids"] == []
    assert [engine.num_requests for engine in engines] == [0, 0]


async def test_session_keeps_engine_and_others_go_to_least_loaded(client, engines):
    await asyncio.gather(*(client.generate_batch(batch([[5, 6]])) for _ in range(8)))
    assert [engine.num_requests for engine in engines] == [4, 4]
    for _ in range(3):
        await client.generate_batch(batch([[5, 6]], session_ids=["s1"]))
    assert sorted(engine.num_requests for engine in engines) == [4, 7]


async def test_session_turns_compute_only_new_tokens(client, engines):
    """Six conversations over two engines, three turns at the same time: each goes where its last turn is cached."""
    prompts = [[5 + index] * 40 for index in range(6)]
    for _ in range(3):
        ask = [client.generate_batch(batch([p], session_ids=[f"s{i}"])) for i, p in enumerate(prompts)]
        answers = [output["response_ids"][0] for output in await asyncio.gather(*ask)]
        prompts = [[*prompt, *answer, 9, 8, 7] for prompt, answer in zip(prompts, answers, strict=True)]
    assert sorted(engine.num_requests for engine in engines) == [9, 9]
    metrics = client.take_metrics()
    # A turn's new tokens: three, and the last one of the answer, which was drawn and not computed.
    assert metrics["engines/prompt_tokens_computed"] == 6 * (40 + 4 + 4)
    assert metrics["engines/prefix_cache_hit_rate"] == pytest.approx(1 - 48 / (40 + 49 + 58))
    assert "engines/prefix_cache_hit_rate" not in client.take_metrics()


async def test_draft_tokens_are_counted(make_client: MakeClient):
    client = make_client(num_speculative_tokens=3)
    asked = batch(params={"temperature": 0.0, "max_tokens": 60})
    drafted = await client.generate_batch(asked)
    assert drafted == await make_client().generate_batch(asked)
    metrics = client.take_metrics()
    assert metrics["engines/draft_tokens"] > 0
    assert 0 <= metrics["engines/draft_acceptance_rate"] <= 1
    assert "engines/draft_tokens" not in client.take_metrics()


async def test_engine_never_exceeds_request_limit(make_client: MakeClient):
    client = make_client(max_requests_per_engine=3)
    limited = await asyncio.gather(client.generate_batch(batch([[5, 6]] * 10)), client.generate_batch(batch()))
    assert [engine.most_at_a_time for engine in client.engines] == [3, 3]  # type: ignore[attr-defined]
    assert limited[1] == await make_client().generate_batch(batch())


async def test_conversations_are_templated_and_invalid_batches_rejected(client):
    conversation = [{"role": "user", "content": "hi"}]
    tokens = client.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    by_text = await client.generate_batch(InferenceEngineInput(prompts=[conversation], sampling_params=PARAMS))
    by_ids = await client.generate_batch(batch([tokens["input_ids"]]))
    assert by_text == by_ids
    with pytest.raises(ValueError, match="prompt_token_ids"):
        await client.generate_batch(InferenceEngineInput(sampling_params=PARAMS))
    with pytest.raises(ValueError, match="session_ids"):
        await client.generate_batch(InferenceEngineInput(prompt_token_ids=[[5], [6]], session_ids=["a"]))
    with pytest.raises(ValueError, match=r".seed, index. pair"):
        await client.generate_batch(batch([[5], [6]], PARAMS | {"seed": [[1, 2]]}))
    with pytest.raises(ValueError, match="at least one engine"):
        InferenceEngineClient([], client.tokenizer, SkyRLConfig())


async def test_conversations_use_configured_template(make_client: MakeClient, tmp_path: Path):
    (tmp_path / "template.jinja").write_text("{{ note }}{{ messages[0].content }}")
    template = {"source": "file", "name_or_path": str(tmp_path / "template.jinja")}
    client = make_client(chat_template=template, chat_template_kwargs={"note": "abc"})
    conversation = [{"role": "user", "content": "hi"}]
    by_text = await client.generate_batch(InferenceEngineInput(prompts=[conversation], sampling_params=PARAMS))
    ids = client.tokenizer("abchi", add_special_tokens=False)["input_ids"]
    assert by_text == await client.generate_batch(batch([ids]))


async def test_invalid_request_fails_fast_without_engine_restart(client, engines):
    with pytest.raises(ValueError, match="in the vocabulary"):
        await client.generate_batch(batch([[5], [99_999], [6]]))
    with pytest.raises(ValueError, match="tempurature"):
        await client.generate_batch(batch(params={"tempurature": 1}))
    assert counts(client) == {"engines/deaths": 0, "engines/restarts": 0, "engines/continued_requests": 0}
    assert await client.generate_batch(batch()) == await engines[0].generate_batch(batch()), "no place stays taken"


async def test_requests_without_adapter_use_client_adapter(client):
    client.lora_name = "policy"
    with pytest.raises(ValueError, match="'policy'"):
        await client.generate_batch(batch())
    with pytest.raises(ValueError, match="'critic'"):
        await client.generate_batch(batch(lora_name="critic"))


async def test_requests_aborted_by_pause_resume_bit_exactly(client):
    undisturbed = await client.generate_batch(batch(params=LONG))
    client.take_metrics()
    answers = asyncio.create_task(client.generate_batch(batch(params=LONG)))
    for _ in range(3):
        await under_way(client, len(PROMPTS))
        await client.pause_generation("abort")
        await asyncio.sleep(0.05)
        assert not answers.done()
        assert sum(engine._core.num_running for engine in client.engines) == 0
        await client.resume_generation()
    assert await answers == undisturbed
    assert client.take_metrics()["engines/continued_requests"] == len(PROMPTS)


@pytest.mark.first_case
@pytest.mark.parametrize("continues", [True, False])
async def test_interrupted_constrained_and_penalized_completions_resume(
    make_client: MakeClient, monkeypatch, continues: bool
):
    """Under a grammar and with penalties: engines are told how much of the prompt is the answer, and those that cannot
    be told begin it anew."""
    pytest.importorskip("llguidance", reason="the extra constrained is not installed")
    prefixes: list[int] = []
    describe, generate = Watched.describe, Watched.generate

    async def limited(self: Watched) -> EngineInfo:
        info = await describe(self)
        return info if continues else replace(info, unsupported={"answer_tokens": "not here"})

    async def noted(self: Watched, request: GenerationRequest) -> Completion:
        prefixes.append(request.sampling_params.get("num_answer_tokens", 0))
        return await generate(self, request)

    monkeypatch.setattr(Watched, "describe", limited)
    monkeypatch.setattr(Watched, "generate", noted)
    client = make_client()
    params = LONG | {"constraint": {"lark": "start: /([a-m][n-z]){60}/"}, "frequency_penalty": 0.5, "logprobs": 1}
    undisturbed = await client.generate_batch(batch(params=params))
    answers = asyncio.create_task(client.generate_batch(batch(params=params)))
    await under_way(client, len(PROMPTS))
    await client.pause_generation("abort")
    await client.resume_generation()
    disturbed = await answers
    for name in ("response_ids", "response_logprobs", "stop_reasons"):
        assert disturbed[name] == undisturbed[name]
    assert [top.ids.tolist() for top in disturbed.get("response_top_logprobs") or []] == [
        top.ids.tolist() for top in undisturbed.get("response_top_logprobs") or []
    ]
    assert (max(prefixes) > 0) == continues
    if continues:
        return
    monkeypatch.setattr(request_runner, "MAX_NEW_BEGINNINGS", 1)
    answers = asyncio.create_task(client.generate_batch(batch(params=params)))
    for _ in range(2):
        await under_way(client, len(PROMPTS))
        await client.pause_generation("abort")
        await client.resume_generation()
    with pytest.raises(RolloutError, match=r"generator\.weight_sync_pause=wait"):
        await asyncio.wait_for(answers, 60)


async def test_constraint_failure_affects_only_its_completion(make_client, monkeypatch):
    """Beside others on its engine, and alone there with others elsewhere; a call without any answer raises."""
    client = make_client()
    params = PARAMS | {"constraint": {"lark": "start: /[a-z]{6}/"}, "logprobs": 1, "prompt_logprobs": 1}
    undisturbed = await client.generate_batch(batch(params=params))
    push, failing = AnswerMatcher.push, []

    def fail_first(self: AnswerMatcher, token: int) -> bool:
        failing.append(self)
        if self is failing[0]:
            raise ConstraintFailed("too complex: states")
        return push(self, token)

    monkeypatch.setattr(AnswerMatcher, "push", fail_first)
    for prompts in (PROMPTS, PROMPTS[:2]):
        failing.clear()
        output = await client.generate_batch(batch(prompts, params))
        [failed] = [row for row, failure in enumerate(output.get("failures") or []) if failure is not None]
        assert (output["response_ids"][failed], output["stop_reasons"][failed]) == ([], "error")
        for row in {*range(len(prompts))} - {failed}:
            for name in ("response_ids", "response_logprobs", "prompt_logprobs", "stop_reasons"):
                assert output[name][row] == undisturbed[name][row]
    failing.clear()
    with pytest.raises(ConstraintFailed, match="too complex: states"):
        await client.generate_batch(batch(PROMPTS[:1], params))


async def test_too_many_interruptions_fail_only_their_completion(make_client, monkeypatch):
    describe, generate = Watched.describe, Watched.generate

    async def limited(self: Watched) -> EngineInfo:
        return replace(await describe(self), unsupported={"answer_tokens": "not here"})

    async def interrupted(self: Watched, request: GenerationRequest) -> Completion:
        completion = await generate(self, request)
        return replace(completion, stop_reason="abort") if request.prompt_token_ids == [20] else completion

    monkeypatch.setattr(Watched, "describe", limited)
    client, params = make_client(), PARAMS | {"frequency_penalty": 0.5}
    undisturbed = await client.generate_batch(batch(params=params))
    monkeypatch.setattr(Watched, "generate", interrupted)
    output = await client.generate_batch(batch(params=params))
    *none, failure = output.get("failures") or []
    assert none == [None] * 4
    assert isinstance(failure, RolloutError)
    assert "interrupted 9 times" in str(failure)
    assert output["response_ids"] == [*undisturbed["response_ids"][:4], []]
    with pytest.raises(RolloutError, match="interrupted 9 times"):
        await client.generate_batch(batch([[20]], params))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_requests_submitted_during_pause_wait(client, engines, mode):
    await client.pause_generation(mode)
    await client.pause_generation(mode)  # a sync that is repeated pauses again
    answer = asyncio.create_task(client.generate_batch(batch()))
    await asyncio.sleep(0.1)
    assert [engine.num_requests for engine in engines] == [0, 0]
    await client.resume_generation()
    assert len((await answer)["response_ids"]) == len(PROMPTS)


async def test_requests_wait_while_engines_sleep(client, engines):
    await client.sleep()
    answer = asyncio.create_task(client.generate_batch(batch()))
    await client.wake_up(["weights"])
    await asyncio.sleep(0.1)
    assert [engine.num_requests for engine in engines] == [0, 0]
    await client.wake_up(["kv_cache"])
    assert len((await answer)["response_ids"]) == len(PROMPTS)


async def test_rejected_sleep_does_not_block_requests(client):
    answers = asyncio.create_task(client.generate_batch(batch(params=LONG)))
    await under_way(client, len(PROMPTS))
    with pytest.raises(RuntimeError, match="cannot sleep while"):
        await client.sleep()
    await client.generate_batch(batch())
    await answers


async def test_abort_ends_running_and_waiting_requests(client):
    undisturbed = await client.generate_batch(batch(params=LONG))
    running = asyncio.create_task(client.generate_batch(batch(params=LONG)))
    await under_way(client, len(PROMPTS))
    await client.abort_generation()
    written = await running
    assert written["stop_reasons"] == ["abort"] * len(PROMPTS)
    for part, whole in zip(written["response_ids"], undisturbed["response_ids"], strict=True):
        assert 0 < len(part) < len(whole) and whole[: len(part)] == part
    running = asyncio.create_task(client.generate_batch(batch(params=LONG)))
    await under_way(client, len(PROMPTS))
    await client.pause_generation("abort")
    waiting = asyncio.create_task(client.generate_batch(batch()))
    await asyncio.sleep(0.05)
    await client.abort_generation()
    assert (await waiting)["response_ids"] == [[]] * len(PROMPTS)
    assert all(0 < len(ids) < 120 for ids in (await running)["response_ids"])
    await client.resume_generation()
    assert await client.generate_batch(batch(params=LONG)) == undisturbed


async def test_deadline_includes_waiting_and_frees_slot(make_client: MakeClient):
    client = make_client(request_timeout_seconds=1.0, max_requests_per_engine=1)
    await asyncio.gather(*(engine.pause_generation() for engine in client.engines))  # the client does not know
    expected = "the request did not complete within generator.request_timeout_seconds=1; "
    with pytest.raises(TimeoutError, match=expected + "running on engine [01]"):
        await client.generate_batch(batch(PROMPTS[:3]))
    await client.resume_generation()
    await client.generate_batch(batch())
    await client.pause_generation()
    with pytest.raises(TimeoutError, match="generation is paused"):
        await client.generate_batch(batch(PROMPTS[:1]))


async def test_engine_exit_loses_no_request(client, engines):
    undisturbed = await client.generate_batch(batch(params=LONG))
    given: list[int] = []

    async def give_weights(index: int) -> None:
        given.append(index)

    client.give_weights = give_weights
    answers = asyncio.create_task(client.generate_batch(batch(params=LONG)))
    await under_way(client, len(PROMPTS))
    await engines[1].teardown()
    assert await answers == undisturbed
    assert await client.wait_until_healthy()
    assert given == [1]
    assert counts(client) == {"engines/deaths": 1, "engines/restarts": 1, "engines/continued_requests": 2}
    await client.generate_batch(batch())
    assert client.engines[1].num_requests == 2, "the new one takes its share"


async def test_engine_exit_during_control_call_raises_named_error(client, engines):
    await client.infos()
    await engines[0].teardown()
    with pytest.raises(WorkerError, match="the native engine is closed"):
        await client.pause_generation()
    assert engines[1]._pause == "keep", "the others did as told"
    assert await client.wait_until_healthy()
    await client.pause_generation()
    await client.resume_generation()
    assert await client.weight_version() == 0


async def test_exhausted_restarts_fail_all_requests_with_reason(make_client: MakeClient):
    client = make_client(max_engine_restarts=0)
    running = asyncio.create_task(client.generate_batch(batch(params=LONG)))
    await under_way(client, len(PROMPTS))
    await client.pause_generation("abort")
    waiting = asyncio.create_task(client.generate_batch(batch()))
    await client.engines[0].teardown()
    expected = (
        "the native engine is closed\nit is not restarted: all generator.max_engine_restarts=0 restarts were used"
    )
    for call in (
        client.wait_until_healthy(),
        running,
        waiting,
        client.generate_batch(batch()),
        client.pause_generation(),
    ):
        with pytest.raises(WorkerError, match=expected):
            await call


async def test_client_reports_common_capabilities_of_engines(client, engines):
    first, second = await client.infos()
    assert (first, second) == (await engines[0].describe(), await engines[1].describe())
    assert await client.describe() == first
    await client.check_health()


def test_differing_engine_weights_are_detected():
    same = WeightReport(version=4, fingerprints={"a": 1, "b": 2})
    assert _get_common_report([same, WeightReport(version=4, fingerprints={"b": 2, "a": 1})]) == same
    with pytest.raises(WeightSyncError, match="version 4, engine 2"):
        _get_common_report([same, same, WeightReport(version=4, fingerprints={"a": 1, "b": 3})])
