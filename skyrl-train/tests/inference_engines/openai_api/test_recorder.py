"""Recorder: turns that count, and their order."""

import pytest

from skyrl_train.inference_engines.openai_api.errors import ApiError
from skyrl_train.inference_engines.openai_api.recorder import Admission, RecordedTurn, RequestRecorder, SessionRules


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


def test_a_repeated_request_takes_the_place_of_an_answer_that_nobody_used():
    lost, again = turn([1], [2], 0), turn([1], [3], 5)
    assert taken(lost, again) == [[3]]
    assert taken(lost, again, turn([1, 3, 9], [4], 10)) == [[3], [4]]


def test_an_answer_that_was_used_stays_though_its_request_came_again():
    assert taken(turn([1], [2], 0), turn([1, 2, 9], [4], 5), turn([1], [3], 10)) == [[2], [4], [3]]


def test_equal_requests_at_the_same_time_are_no_repeats():
    assert taken(turn([1], [2], 0), turn([1], [3], 0.5)) == [[2], [3]]


def test_two_conversations_of_one_session_stand_one_after_the_other():
    a, b = turn([1], [2], 0), turn([7], [8], 2)
    assert taken(a, b, turn([1, 2, 0], [3], 4), turn([7, 8, 0], [9], 6)) == [[2], [3], [8], [9]]


def test_first_of_two_continuations_stands_behind_its_turn():
    assert taken(turn([1], [2], 0), turn([1, 2, 5], [6], 2), turn([1, 2, 7], [8], 4)) == [[2], [6], [8]]


def test_a_session_is_forgotten_once_taken_and_others_when_memory_is_full():
    recorder = RequestRecorder(max_tokens=10)
    for name in ("a", "b", "c"):
        recorder.record(name, [turn([1, 2, 3], [4], 0)])
    assert recorder.sessions() == ["b", "c"]
    assert recorder.num_dropped_sessions == 1
    assert len(recorder.take("b")) == 1
    assert recorder.take("b") == []
    recorder.record("d", [turn([1, 2, 3], [4], 0)])
    assert recorder.sessions() == ["c", "d"]


def test_sessions_that_wait_for_their_first_turn_are_not_dropped_for_memory():
    recorder = RequestRecorder(max_tokens=10, begun_only=True)
    for name in ("waits", "a", "b", "c"):
        recorder.begin(name, SessionRules())
    for name in ("a", "b", "c"):
        recorder.record(name, [turn([1, 2, 3], [4], 0)])
    assert recorder.sessions() == ["b", "c"]
    assert recorder.admit("waits") == Admission()


def test_a_session_has_a_budget_of_turns_and_of_tokens():
    recorder = RequestRecorder()
    recorder.begin("turns", SessionRules(max_turns=2, max_tokens_per_turn=5, seed_of_turn=lambda turn: 70 + turn))
    admissions = [recorder.admit("turns") for _ in range(2)]
    assert [(admission.seed, admission.max_tokens) for admission in admissions] == [(70, 5), (71, 5)]
    assert [admissions[0].budget(asked, room) for asked, room in ((None, 9), (3, 9), (99, 4))] == [5, 3, 4]
    recorder.begin("tokens", SessionRules(max_tokens=3, sampling={"temperature": 1.0}))
    assert recorder.admit("tokens", num_choices=3).max_tokens == 1, "three answers of a token"
    recorder.record("tokens", [turn([1], [2, 3], 0)])
    assert recorder.admit("tokens") == Admission(sampling={"temperature": 1.0}, max_tokens=1)
    with pytest.raises(ApiError, match="3 tokens is used up"):
        recorder.admit("tokens", num_choices=2)
    recorder.record("tokens", [turn([1], [4], 1)])
    for session, message in (("turns", "2 turns is used up"), ("tokens", "3 tokens is used up")):
        with pytest.raises(ApiError, match=message) as refusal:
            recorder.admit(session)
        assert (refusal.value.status, recorder.take_record(session).used_up) == (403, session)
    assert Admission().budget(99, 4) == 99  # the request's own mistake stays one


def test_a_full_context_is_no_end_for_an_agent_that_shortens_its_conversation():
    recorder = RequestRecorder()
    recorder.begin("a", SessionRules(max_turns=1))
    recorder.admit("a")
    recorder.context_is_full("a")
    recorder.record("a", [turn([1], [2], 0)])
    assert recorder.take_record("a").used_up is None
    recorder.begin("a", SessionRules(max_turns=1))
    recorder.admit("a")
    with pytest.raises(ApiError, match="1 turns is used up"):
        recorder.admit("a")
    recorder.record("a", [turn([1], [2], 0)])  # an answer that was under way
    assert recorder.take_record("a").used_up == "turns"


def test_a_recorder_of_begun_sessions_refuses_those_that_have_ended():
    recorder = RequestRecorder(begun_only=True)
    with pytest.raises(ApiError, match="not open"):
        recorder.admit("a")
    recorder.begin("a", SessionRules())
    recorder.admit("a")
    taken = recorder.take_record("a")
    recorder.record("a", [turn([1], [2], 0)])  # a process that outlived its trajectory
    assert (taken.num_admitted, taken.num_answered, recorder.take("a")) == (1, 0, [])
