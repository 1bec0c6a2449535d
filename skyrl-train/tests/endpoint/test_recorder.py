"""Recorder: turns that count, and their order."""

import asyncio
import gc
import tracemalloc
from dataclasses import replace

import pytest

from skyrl_train.endpoint.errors import ApiError
from skyrl_train.endpoint.recorder import RecordedTurn, RequestRecorder, SessionRules


def turn(prompt: list[int], response: list[int], started: float, request: str | None = None) -> RecordedTurn:
    return RecordedTurn(
        prompt_ids=prompt,
        response_ids=response,
        log_probs=[-1.0] * len(response),
        weight_versions=[0] * len(response),
        stop_reason="stop",
        temperature=1.0,
        messages=None,
        answer=None,
        request=request or repr(prompt),
        started=started,
        finished=started + 1,
    )


def taken(*turns: RecordedTurn) -> list[list[int]]:
    recorder = RequestRecorder()
    for each in turns:
        recorder.record("s", [each])
    return [each.response_ids for each in recorder.take("s")]


def test_repeated_request_replaces_unused_response():
    lost, again = turn([1], [2], 0), turn([1], [3], 5)
    assert taken(lost, again) == [[3]]
    assert taken(lost, again, turn([1, 3, 9], [4], 10)) == [[3], [4]]


def test_used_response_stays_when_request_is_repeated():
    assert taken(turn([1], [2], 0), turn([1, 2, 9], [4], 5), turn([1], [3], 10)) == [[2], [4], [3]]


def test_concurrent_equal_requests_are_not_repeats():
    assert taken(turn([1], [2], 0), turn([1], [3], 0.5)) == [[2], [3]]


def test_conversations_of_session_are_listed_in_sequence():
    a, b = turn([1], [2], 0), turn([7], [8], 2)
    assert taken(a, b, turn([1, 2, 0], [3], 4), turn([7, 8, 0], [9], 6)) == [[2], [3], [8], [9]]


def test_first_of_two_continuations_follows_parent_turn():
    assert taken(turn([1], [2], 0), turn([1, 2, 5], [6], 2), turn([1, 2, 7], [8], 4)) == [[2], [6], [8]]


def test_sessions_are_removed_when_taken_or_memory_is_full():
    size = RequestRecorder()
    size.record("a", [turn([1, 2, 3], [4], 0)])
    recorder = RequestRecorder(max_bytes=int(2.5 * size.num_bytes))
    for name in ("a", "b", "c"):
        recorder.record(name, [turn([1, 2, 3], [4], 0)])
    assert recorder.list_sessions() == ["b", "c"]
    assert recorder.num_dropped_sessions == 1
    assert len(recorder.take("b")) == 1
    assert recorder.take("b") == []
    recorder.record("d", [turn([1, 2, 3], [4], 0)])
    assert recorder.list_sessions() == ["c", "d"]
    recorder.begin("c", SessionRules())  # anew
    recorder.take("d")
    assert (recorder.list_sessions(), recorder.num_bytes) == ([], 0)


async def test_sessions_without_turns_are_not_evicted():
    recorder = RequestRecorder(max_bytes=1, begun_only=True)
    for name in ("waits", "a", "b"):
        recorder.begin(name, SessionRules())
    for name in ("a", "b"):
        recorder.record(name, [turn([1, 2, 3], [4], 0)])
    assert recorder.list_sessions() == ["b"]
    assert (await recorder.admit("waits")).max_tokens is None


async def test_session_has_turn_and_token_budgets():
    recorder = RequestRecorder()
    recorder.begin("turns", SessionRules(max_turns=2, max_tokens_per_turn=5, seed_of_turn=lambda turn: 70 + turn))
    admissions = [await recorder.admit("turns", most=most) for most in (None, 3)]
    assert [(admission.seeds, admission.max_tokens) for admission in admissions] == [((70,), 5), ((71,), 3)]
    rules = SessionRules(max_tokens=3, sampling={"temperature": 1.0}, ignored=("top_k",))
    recorder.begin("tokens", rules)
    assert rules.build_keywords({"top_k": 5, "top_p": 0.5}) == {"top_p": 0.5, "temperature": 1.0}
    three = await recorder.admit("tokens", num_choices=3)
    assert three.max_tokens == 1, "three answers of a token"
    recorder.release(three)
    recorder.record("tokens", [turn([1], [2, 3], 0)])
    with pytest.raises(ApiError, match="3 tokens is exhausted"):
        await recorder.admit("tokens", num_choices=2)
    recorder.record("tokens", [turn([1], [4], 1)])
    for session, message in (("turns", "2 turns is exhausted"), ("tokens", "3 tokens is exhausted")):
        with pytest.raises(ApiError, match=message) as refusal:
            await recorder.admit(session)
        assert (refusal.value.status, recorder.take_record(session).used_up) == (403, session)


async def test_parallel_requests_share_token_budget_of_session():
    recorder = RequestRecorder()
    recorder.begin("s", SessionRules(max_tokens=10))
    small, rest = await recorder.admit("s", most=4), asyncio.create_task(recorder.admit("s"))
    other = asyncio.create_task(recorder.admit("s", most=6))
    await asyncio.sleep(0.01)
    assert (small.max_tokens, rest.done(), other.done()) == (4, False, True)
    recorder.record("s", [turn([1], [2], 0)])
    recorder.release(small)
    recorder.release(other.result())  # it failed: all of its tokens are free again
    assert (await asyncio.wait_for(rest, 5)).max_tokens == 9, "all but the token that was generated"
    waits = asyncio.create_task(recorder.admit("s"))
    await asyncio.sleep(0.01)
    recorder.record("s", [turn([1], list(range(9)), 0)])
    recorder.release(rest.result())
    with pytest.raises(ApiError, match="10 tokens is exhausted"):
        await asyncio.wait_for(waits, 5)


async def test_request_without_output_returns_turn_and_seed():
    recorder = RequestRecorder()
    recorder.begin("s", SessionRules(max_turns=3, seed_of_turn=lambda turn: turn))
    refused, two = await recorder.admit("s"), await recorder.admit("s", num_prompts=2)
    assert (refused.seeds, two.seeds) == ((0,), (1, 2))
    recorder.release(two)
    recorder.release(refused, uses_turns=False)
    assert (await recorder.admit("s")).seeds == (0,), "no other turn has that seed"
    with pytest.raises(ApiError, match="3 turns is exhausted"):
        await recorder.admit("s")


def test_growing_conversation_is_stored_once():
    recorder, prompt, messages, said, given = RequestRecorder(), [7] * 300, [], [], 0
    gc.collect()
    tracemalloc.start()
    for number in range(40):
        messages = [dict(each) for each in messages] + [{"role": "user", "content": f"{number}" * 200}]
        answer = [number] * 100
        each = turn(list(prompt), answer, number, request=str(number))
        each = RecordedTurn(**each.__dict__ | {"messages": messages, "log_probs": [-1 / 3] * 100})
        said.append((len(prompt), answer, len(messages)))
        recorder.record("s", [each])
        given += each.num_tokens
        prompt = prompt + answer + [1000 + number] * 50
    del each, messages, answer
    gc.collect()
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert given > 120_000
    assert recorder.num_bytes == pytest.approx(taken_bytes, rel=0.4)
    assert recorder.num_bytes < 2 * given, "lists take 8 bytes a token and more"
    turns = recorder.take("s")
    assert recorder.num_bytes == 0
    assert [(len(turn.prompt_ids), turn.response_ids, len(turn.messages or [])) for turn in turns] == said
    assert turns[-1].log_probs == [-1 / 3] * 100, "which float32 cannot hold"
    assert turns[-1].prompt_ids == prompt[: said[-1][0]]


@pytest.mark.parametrize(
    "character, size", [("a", 1), ("\N{LATIN SMALL LETTER E WITH ACUTE}", 1), ("\u6f22", 2), ("\U0001f600", 4)]
)
@pytest.mark.parametrize("content", [str, lambda text: [{"type": "text", "text": text}]])
def test_memory_of_messages_is_counted_in_bytes_not_characters(character, size, content):
    recorder = RequestRecorder()
    message = {"role": "user", "content": content(character * 100_000)}
    recorder.record("s", [replace(turn([1], [2], 0), messages=[message])])
    assert recorder.num_bytes == pytest.approx(size * 100_000, rel=0.03)


def test_empty_completion_is_continuable_turn():
    assert taken(turn([1], [], 0), turn([1, 5], [6], 2), turn([1, 7], [8], 4)) == [[], [6], [8]]


async def test_full_context_is_recoverable_by_shortening_conversation():
    recorder = RequestRecorder()
    recorder.begin("a", SessionRules(max_turns=1))
    await recorder.admit("a")
    recorder.record_full_context("a")
    recorder.record("a", [turn([1], [2], 0)])
    assert recorder.take_record("a").used_up is None
    recorder.begin("a", SessionRules(max_turns=1))
    await recorder.admit("a")
    with pytest.raises(ApiError, match="1 turns is exhausted"):
        await recorder.admit("a")
    recorder.record("a", [turn([1], [2], 0)])  # an answer that was under way
    assert recorder.take_record("a").used_up == "turns"


async def test_recorder_rejects_ended_sessions():
    recorder = RequestRecorder(begun_only=True)
    with pytest.raises(ApiError, match="closed"):
        await recorder.admit("a")
    recorder.begin("a", SessionRules(max_tokens=1))
    admission, waits = await recorder.admit("a"), asyncio.create_task(recorder.admit("a"))
    await asyncio.sleep(0.01)
    taken = recorder.take_record("a")
    with pytest.raises(ApiError, match="closed"):
        await asyncio.wait_for(waits, 5)
    recorder.record("a", [turn([1], [2], 0)])  # a process that outlived its trajectory
    recorder.release(admission)
    assert (taken.num_admitted, taken.num_answered, recorder.take("a")) == (1, 0, [])
