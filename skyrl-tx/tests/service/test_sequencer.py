"""One model's requests come out in order, whatever order they come in."""

import itertools

import pytest

from tx.tinker.service.sequencer import FURTHEST_AHEAD, Sequencer


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(4))))
def test_sequencer_restores_seq_order_for_any_arrival_order(arrival):
    sequencer = Sequencer[str]()
    assert [item for seq in arrival for item in sequencer.offer(seq, f"r{seq}", now=0.0)] == ["r0", "r1", "r2", "r3"]
    assert (sequencer.next_seq, sequencer.num_waiting) == (4, 0)


@pytest.mark.parametrize(
    "offers, due",
    [
        ([(1, "a")], [["a"]]),
        ([(2, "b"), (1, "a")], [[], ["a", "b"]]),
        ([(3, "c"), (2, "b"), (1, "a")], [[], [], ["a", "b", "c"]]),
        ([(2, "b"), (1, None)], [[], ["b"]]),  # a refused one lets its successors go
        ([(2, None), (3, "c"), (1, "a")], [[], [], ["a", "c"]]),
        ([(1, None), (2, None), (3, "c")], [[], [], ["c"]]),
    ],
)
def test_refused_request_only_consumes_seq(offers, due):
    sequencer = Sequencer[str](next_seq=1)
    assert [sequencer.offer(seq, item, now=0.0) for seq, item in offers] == due


def test_known_requests_are_known_waiting_or_not():
    sequencer = Sequencer[str](next_seq=5)
    sequencer.offer(7, "later", now=0.0)
    assert [seq for seq in range(10) if sequencer.knows(seq)] == [0, 1, 2, 3, 4, 7]
    with pytest.raises(ValueError, match="seq 7"):
        sequencer.offer(7, "again", now=0.0)


@pytest.mark.parametrize(
    "seq, too_far", [(-1, True), (0, False), (FURTHEST_AHEAD, False), (FURTHEST_AHEAD + 1, True), (2**31 - 1, True)]
)
def test_no_client_is_so_far_ahead(seq, too_far):
    assert Sequencer[str]().too_far(seq) is too_far


def test_sequence_gap_is_abandoned_with_directly_following_requests():
    sequencer = Sequencer[str](next_seq=2)
    for seq, now in [(3, 10.0), (4, 20.0), (6, 30.0)]:
        assert sequencer.offer(seq, f"r{seq}", now=now) == []
    assert sequencer.give_up(waiting_since_before=9.0) is None
    given_up = sequencer.give_up(waiting_since_before=10.0)
    assert given_up is not None
    assert (given_up.missing, given_up.stranded) == (range(2, 3), ["r3", "r4"])
    assert sequencer.give_up(waiting_since_before=10.0) is None, "6 waits for 5, and not for so long"
    assert sequencer.offer(5, "r5", now=40.0) == ["r5", "r6"]


def test_sequence_without_gap_abandons_nothing_and_drain_returns_waiting():
    sequencer = Sequencer[str]()
    sequencer.offer(0, "r0", now=0.0)
    assert sequencer.give_up(waiting_since_before=1e9) is None
    for seq in (5, 2, 3):
        sequencer.offer(seq, None if seq == 3 else f"r{seq}", now=0.0)
    assert sequencer.drain() == ["r2", "r5"]
    assert sequencer.num_waiting == 0
