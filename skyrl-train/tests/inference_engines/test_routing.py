"""Routing of requests to engines, and the queue before them."""

import itertools
from collections import Counter

import pytest

from skyrl_train.inference_engines.routing import Interrupted, QueueEntry, Router, SlotGrant, SlotRequest


def granted(entry: QueueEntry) -> SlotGrant | None:
    return entry.granted.result() if entry.granted.done() else None


def open_router(num_engines: int, limit: int | None = None) -> Router:
    router = Router(num_engines, limit)
    router.set_engines(range(num_engines))
    return router


async def test_new_requests_go_to_engine_with_fewest_requests():
    router = open_router(3)
    first = granted(router.request_slots(0, [SlotRequest()] * 7))
    assert first == SlotGrant({0: [0, 3, 6], 1: [1, 4], 2: [2, 5]}, None)
    router.release(2, [SlotRequest()] * 2)
    assert granted(router.request_slots(1, [SlotRequest()] * 3)) == SlotGrant({2: [0, 1], 1: [2]}, None)


async def test_prompt_length_breaks_ties_between_engines():
    router = open_router(2)
    granted(router.request_slots(0, [SlotRequest(num_tokens=900), SlotRequest(num_tokens=10)]))
    assert granted(router.request_slots(1, [SlotRequest(num_tokens=10)])) == SlotGrant({1: [0]}, None)


def place(router: Router, session: str | None = None, prompt: int | None = None) -> int:
    """Let one request have a slot, which it keeps; return its engine."""
    grant = granted(router.request_slots(0, [SlotRequest(session, prompt=prompt)]))
    assert grant is not None
    [engine] = grant.slots
    return engine


async def test_sessions_stay_on_their_engine_and_are_spread_evenly():
    router = open_router(3)
    first = {f"s{index}": place(router, f"s{index}") for index in range(9)}
    assert sorted(first.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for engine in range(3):
        router.release(engine, [SlotRequest()] * 3)
    for session in reversed(first):
        assert place(router, session) == first[session]
        router.release(first[session], [SlotRequest()])


async def test_session_leaves_engine_that_has_much_more_to_do_and_stays_on_the_new_one():
    router = open_router(2)
    assert place(router, "a") == 0
    router.release(0, [SlotRequest()])
    at_work = granted(router.request_slots(0, [SlotRequest()] * 8))
    assert at_work is not None
    router.release(1, [SlotRequest()] * 3)
    assert place(router, "a") == 0, "4 and 1: a little more"
    assert place(router, "b") == 1
    router.release(1, [SlotRequest()] * 2)
    assert place(router, "a") == 1, "5 and 0: much more"
    router.release(0, [SlotRequest()] * 5)
    assert place(router, "a") == 1, "what it has is cached there by now"


async def test_engine_death_moves_only_its_sessions():
    router = open_router(3)
    first = {f"s{index}": place(router, f"s{index}") for index in range(30)}
    for engine in range(3):
        router.release(engine, [SlotRequest()] * 10)
    router.set_engines([0, 1])
    now = {}
    for session in first:
        now[session] = place(router, session)
        router.release(now[session], [SlotRequest()])
    assert all(now[session] == engine for session, engine in first.items() if engine != 2)


async def test_samples_of_a_prompt_go_to_one_engine_as_far_as_the_load_is_even():
    router = open_router(2)
    samples = [SlotRequest(prompt=index // 8) for index in range(64)]
    grant = granted(router.request_slots(0, samples))
    assert grant is not None and [len(indices) for indices in grant.slots.values()] == [32, 32]
    assert all(len({index // 8 for index in indices}) == 4 for indices in grant.slots.values()), "whole groups"
    for engine in range(2):
        router.release(engine, [SlotRequest()] * 32)
    grant = granted(router.request_slots(0, [SlotRequest(prompt=99)] * 10))
    assert grant is not None and [len(indices) for indices in grant.slots.values()] == [5, 5], "one prompt: divided"
    for engine in range(2):
        router.release(engine, [SlotRequest()] * 5)
    engines = [place(router, f"s{index}", prompt=index // 8) for index in range(64)]
    assert 28 <= sum(engines) <= 36
    moves = sum(before != after for before, after in itertools.pairwise(engines))
    assert moves < 24, f"one by one, {moves} times another engine: 63 where the load alone decides"


async def test_announced_sessions_are_divided_evenly_in_whole_groups_though_they_come_one_by_one():
    router = open_router(2)
    groups = [[f"{prompt}_{sample}" for sample in range(8)] for prompt in range(8)]
    router.announce(groups)
    engines = {session: place(router, session, prompt=int(session[0])) for group in groups for session in group}
    assert sum(engines.values()) == 32
    assert all(len({engines[session] for session in group}) == 1 for group in groups), "whole groups"
    router.withdraw_announcement(groups)
    assert [router.num_under_way(engine) for engine in range(2)] == [32, 32]


async def test_one_announced_group_is_divided_over_all_engines():
    router = open_router(3)
    router.announce([[f"s{index}" for index in range(10)]])
    assert sorted(Counter(place(router, f"s{index}") for index in range(10)).values()) == [3, 3, 4]


async def test_sessions_that_never_came_are_no_load_once_their_announcement_is_withdrawn():
    router = open_router(2)
    groups = [["a", "b"], ["c", "d"], ["e"]]
    router.announce(groups)  # three sessions on engine 0
    assert place(router, "other") == 1
    router.withdraw_announcement(groups)
    assert place(router, "next") == 0


async def test_announced_session_of_a_dead_engine_goes_to_another():
    router = open_router(2)
    router.announce([["a"], ["b"]])
    router.set_engines([1])
    assert place(router, "a") == 1
    router.set_engines([0, 1])
    assert place(router, "c") == 0, "the announcement of a session that came elsewhere is no load"


async def test_suspect_engine_keeps_sessions_but_gets_no_new_requests():
    router = open_router(2)
    assert place(router, "a", prompt=7) == 0
    router.set_engines([0, 1], doubtful=[0])
    requests = [SlotRequest("a"), SlotRequest(), SlotRequest(prompt=7)]
    assert granted(router.request_slots(0, requests)) == SlotGrant({0: [0], 1: [1, 2]}, None)
    router.set_engines([0], doubtful=[0])
    assert granted(router.request_slots(1, [SlotRequest()])) == SlotGrant({0: [0]}, None), "better than none"


async def test_requests_above_limit_wait_in_order_of_arrival():
    router = open_router(1, limit=2)
    batch = granted(router.request_slots(0, [SlotRequest()] * 3))
    assert batch is not None and batch.slots == {0: [0, 1]}
    assert batch.rest is not None
    later = router.request_slots(1, [SlotRequest()])
    router.release(0, [SlotRequest()])
    assert granted(batch.rest) == SlotGrant({0: [2]}, None), "the rest of a batch keeps its place"
    assert granted(later) is None
    earlier = router.request_slots(0, [SlotRequest()])  # one that was interrupted comes back with its ticket
    router.release(0, [SlotRequest()])
    assert granted(earlier) == SlotGrant({0: [0]}, None)
    assert granted(later) is None and router.num_waiting == 1
    router.release(0, [SlotRequest()])
    assert granted(later) == SlotGrant({0: [0]}, None)
    assert router.num_under_way(0) == 2


async def test_session_of_full_engine_goes_to_another_and_waits_only_if_all_are_full():
    router = open_router(2, limit=1)
    assert place(router, "a") == 0
    assert place(router, "a") == 1
    waiting = router.request_slots(1, [SlotRequest("a")])
    newcomer = router.request_slots(2, [SlotRequest()])
    assert granted(waiting) is None
    router.release(0, [SlotRequest("a")])
    assert granted(waiting) == SlotGrant({0: [0]}, None), "before the newcomer, who could have had it as well"
    assert granted(newcomer) is None


async def test_no_slots_are_granted_while_admission_is_paused_or_no_engine_is_open():
    router = Router(1)
    router.pause_admission("paused")
    router.pause_admission("asleep")
    entry = router.request_slots(0, [SlotRequest()])
    for step in (lambda: router.set_engines([0]), lambda: router.resume_admission("paused")):
        step()
        assert granted(entry) is None
    router.resume_admission("asleep")
    assert granted(entry) == SlotGrant({0: [0]}, None)


async def test_withdrawn_entries_keep_no_slots():
    router = open_router(1, limit=1)
    taken = router.request_slots(0, [SlotRequest(), SlotRequest()])
    router.withdraw(router.request_slots(1, [SlotRequest()]))
    router.withdraw(taken)  # granted, but nobody came for it
    assert (router.num_waiting, router.num_under_way(0)) == (0, 0)
    assert granted(router.request_slots(2, [SlotRequest()])) == SlotGrant({0: [0]}, None)


async def test_interrupt_ends_waits_and_failure_ends_later_waits_too():
    router = Router(1)
    entry = router.request_slots(0, [SlotRequest()])
    router.interrupt()
    with pytest.raises(Interrupted):
        entry.granted.result()
    entry = router.request_slots(1, [SlotRequest()])
    router.fail(RuntimeError("over"))
    for late in (entry, router.request_slots(2, [SlotRequest()])):
        with pytest.raises(RuntimeError, match="over"):
            late.granted.result()
