"""Recorder: turns that count, and their order."""

from skyrl_train.inference_engines.openai_api.recorder import RecordedTurn, RequestRecorder


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
