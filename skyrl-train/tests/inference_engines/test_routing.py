"""Routing of requests to engines, and the queue before them."""

import itertools
from collections import Counter

import pytest

from skyrl_train.inference_engines.routing import Interrupted, QueueEntry, Router, SlotRequest


def granted(entry: QueueEntry) -> int | None:
    """Return the engine on which a request got a slot."""
    return entry.granted.result() if entry.granted.done() else None


def ask(router: Router, *requests: SlotRequest) -> list[int | None]:
    return [granted(router.request_slot(0, request)) for request in requests]


def release(router: Router, engine: int, num: int = 1) -> None:
    for _ in range(num):
        router.release(engine, SlotRequest())


def open_router(num_engines: int, limit: int | None = None) -> Router:
    router = Router(num_engines, limit)
    router.set_engines(range(num_engines))
    return router


async def test_new_request_selects_engine_with_fewest_requests():
    router = open_router(3)
    assert ask(router, *[SlotRequest()] * 7) == [0, 1, 2, 0, 1, 2, 0]
    release(router, 2, 2)
    assert ask(router, *[SlotRequest()] * 3) == [2, 2, 1]


async def test_prompt_length_breaks_ties_between_engines():
    router = open_router(2)
    ask(router, SlotRequest(num_tokens=900), SlotRequest(num_tokens=10))
    assert ask(router, SlotRequest(num_tokens=10)) == [1]


def place(router: Router, session: str | None = None, prompt: int | None = None) -> int:
    """Let one request have a slot, which it keeps; return its engine."""
    [engine] = ask(router, SlotRequest(session, prompt=prompt))
    assert engine is not None
    return engine


async def test_sessions_stay_on_their_engine_and_are_spread_evenly():
    router = open_router(3)
    first = {f"s{index}": place(router, f"s{index}") for index in range(9)}
    assert sorted(first.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for engine in range(3):
        release(router, engine, 3)
    for session in reversed(first):
        assert place(router, session) == first[session]
        release(router, first[session])


async def test_session_moves_from_overloaded_engine_and_stays():
    router = open_router(2)
    assert place(router, "a") == 0
    release(router, 0)
    ask(router, *[SlotRequest()] * 8)
    release(router, 1, 3)
    assert place(router, "a") == 0, "4 and 1: a little more"
    assert place(router, "b") == 1
    release(router, 1, 2)
    assert place(router, "a") == 1, "5 and 0: much more"
    release(router, 0, 5)
    assert place(router, "a") == 1, "what it has is cached there by now"


async def test_engine_crash_moves_only_affected_sessions():
    router = open_router(3)
    first = {f"s{index}": place(router, f"s{index}") for index in range(30)}
    for engine in range(3):
        release(router, engine, 10)
    router.set_engines([0, 1])
    now = {}
    for session in first:
        now[session] = place(router, session)
        release(router, now[session])
    assert all(now[session] == engine for session, engine in first.items() if engine != 2)


async def test_samples_of_prompt_share_engine_while_load_is_even():
    router = open_router(2)
    engines = [place(router, f"s{index}", prompt=index // 8) for index in range(64)]
    assert 28 <= sum(engines) <= 36
    moves = sum(before != after for before, after in itertools.pairwise(engines))
    assert moves < 24, f"one by one, {moves} times another engine: 63 where the load alone decides"


async def test_expected_sessions_are_divided_evenly_in_whole_groups():
    router = open_router(2)
    groups = [[f"{prompt}_{sample}" for sample in range(8)] for prompt in range(8)]
    router.register_expected(groups)
    engines = {session: place(router, session, prompt=int(session[0])) for group in groups for session in group}
    assert sum(engines.values()) == 32
    assert all(len({engines[session] for session in group}) == 1 for group in groups), "whole groups"
    router.remove_expected(groups)
    assert [router.count_running(engine) for engine in range(2)] == [32, 32]


async def test_single_expected_group_is_divided_over_engines():
    router = open_router(3)
    router.register_expected([[f"s{index}" for index in range(10)]])
    assert sorted(Counter(place(router, f"s{index}") for index in range(10)).values()) == [3, 3, 4]


async def test_withdrawn_expected_sessions_count_as_no_load():
    router = open_router(2)
    groups = [["a", "b"], ["c", "d"], ["e"]]
    router.register_expected(groups)  # three sessions on engine 0
    assert place(router, "other") == 1
    router.remove_expected(groups)
    assert place(router, "next") == 0


async def test_expected_session_of_crashed_engine_is_reassigned():
    router = open_router(2)
    router.register_expected([["a"], ["b"]])
    router.set_engines([1])
    assert place(router, "a") == 1
    router.set_engines([0, 1])
    assert place(router, "c") == 0, "the announcement of a session that came elsewhere is no load"


async def test_suspect_engine_keeps_sessions_but_gets_no_new_requests():
    router = open_router(2)
    assert place(router, "a", prompt=7) == 0
    router.set_engines([0, 1], doubtful=[0])
    assert ask(router, SlotRequest("a"), SlotRequest(), SlotRequest(prompt=7)) == [0, 1, 1]
    router.set_engines([0], doubtful=[0])
    assert ask(router, SlotRequest()) == [0], "better than none"


async def test_requests_above_limit_wait_in_order_of_arrival():
    router = open_router(1, limit=2)
    assert ask(router, *[SlotRequest()] * 2) == [0, 0]
    third, later = router.request_slot(0, SlotRequest()), router.request_slot(1, SlotRequest())
    release(router, 0)
    assert granted(third) == 0
    assert granted(later) is None
    earlier = router.request_slot(0, SlotRequest())  # one that was interrupted comes back with its ticket
    release(router, 0)
    assert granted(earlier) == 0
    assert granted(later) is None and router.num_waiting == 1
    release(router, 0)
    assert granted(later) == 0
    assert router.count_running(0) == 2


async def test_session_waits_only_when_all_engines_are_full():
    router = open_router(2, limit=1)
    assert place(router, "a") == 0
    assert place(router, "a") == 1
    waiting = router.request_slot(1, SlotRequest("a"))
    newcomer = router.request_slot(2, SlotRequest())
    assert granted(waiting) is None
    release(router, 0)
    assert granted(waiting) == 0, "before the newcomer, who could have had it as well"
    assert granted(newcomer) is None


async def test_no_slots_while_admission_is_paused_or_engines_closed():
    router = Router(1)
    router.pause_admission("paused")
    router.pause_admission("asleep")
    entry = router.request_slot(0, SlotRequest())
    for step in (lambda: router.set_engines([0]), lambda: router.resume_admission("paused")):
        step()
        assert granted(entry) is None
    router.resume_admission("asleep")
    assert granted(entry) == 0


async def test_withdrawn_entries_release_slots():
    router = open_router(1, limit=1)
    taken = router.request_slot(0, SlotRequest())
    router.withdraw(router.request_slot(1, SlotRequest()))
    router.withdraw(taken)  # granted, but nobody came for it
    assert (router.num_waiting, router.count_running(0)) == (0, 0)
    assert granted(router.request_slot(2, SlotRequest())) == 0


async def test_interrupt_ends_waits_and_failure_ends_later_waits():
    router = Router(1)
    entry = router.request_slot(0, SlotRequest())
    router.interrupt()
    with pytest.raises(Interrupted):
        entry.granted.result()
    entry = router.request_slot(1, SlotRequest())
    router.fail(RuntimeError("over"))
    for late in (entry, router.request_slot(2, SlotRequest())):
        with pytest.raises(RuntimeError, match="over"):
            late.granted.result()
