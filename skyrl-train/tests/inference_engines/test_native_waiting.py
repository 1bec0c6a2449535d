"""Order of waiting requests, by hand and in the core: long requests of one group beside short ones of another."""

import numpy as np
import pytest
from native_runs import make_core

from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request
from skyrl_train.inference_engines.native.waiting import Waiting


def request(group: str | None, *, length: int = 5, max_tokens: int | None = 4, seed: int = 0) -> Request:
    prompt = np.random.default_rng(seed).integers(2, 62, length)
    return Request(prompt, EngineSamplingParams(max_tokens=max_tokens), (seed, 0), group=group)


def admitted(waiting: Waiting, num_rows: int) -> str:
    """Return the order in which requests get rows, while there are any for them."""
    taken = []
    while (chosen := waiting.get_next(num_rows - len(taken))) is not None:
        waiting.take(chosen)
        taken.append(chosen)
    return "".join(chosen.group or "." for chosen in taken)


@pytest.mark.parametrize(
    "arrivals, num_rows, order",
    [
        ("....", 3, "..."),  # nobody in particular: by arrival, every row
        ("aaabbc", 16, "abcaba"),  # groups in turn
        ("aaaaaaaaaa", 8, "aaaaaa"),  # alone: three rows for each that stays free
        ("aaaaaaaabbbbbbbb", 8, "abababa"),  # two groups: after 4 and 3 nobody is below 3 x 1 row
        ("a", 1, "a"),
        ("ab", 1, "a"),
    ],
)
def test_groups_are_admitted_round_robin(arrivals, num_rows, order):
    waiting = Waiting()
    for group in arrivals:
        waiting.add(request(None if group == "." else group))
    assert admitted(waiting, num_rows) == order
    assert len(waiting) == len(arrivals) - len(order)


def test_group_requests_start_in_arrival_order():
    waiting = Waiting()
    requests = [request("a", seed=index) for index in range(5)]
    for one in requests:
        waiting.add(one)
    for expected in requests[:3]:
        assert waiting.get_next(4) is expected
        waiting.take(expected)
    assert waiting.get_next(1) is None  # three are held and one row is free
    waiting.release_row(requests[0])
    assert waiting.get_next(2) is requests[3]
    assert waiting.remove(lambda one: one is requests[3]) == [requests[3]]
    assert waiting.get_next(2) is requests[4] and len(waiting) == 1


def test_late_group_starts_despite_saturating_group(tiny_models):
    core = make_core(tiny_models("qwen3"), max_num_seqs=16)
    for index in range(100):
        core.add_request(request("greedy", max_tokens=200, seed=index))
    core.step()
    assert core.num_running == 12
    for index in range(9):
        core.add_request(request("late", max_tokens=3, seed=index))
    ended = [request for _ in range(9) for request in core.step()]
    assert [request.group for request in ended] == ["late"] * 9  # 3 at a time
    assert core.abort() and core.num_running == core.num_waiting == 0


def test_step_admits_bounded_prompt_tokens(tiny_models):
    """Running answers get their next token after at most so much; a prompt above the bound comes in parts."""
    core = make_core(tiny_models("qwen3"), max_num_seqs=64, max_prefill_tokens=128)
    lengths = [40, 40, 30, 300, 1, 1, 60, 60, 60]
    for index, length in enumerate(lengths):
        core.add_request(request(None, length=length, max_tokens=50, seed=index))
    seen = []
    while core.num_waiting:
        before = core.num_prompt_tokens_computed
        core.step()
        seen.append((core.num_running, core.num_prompt_tokens_computed - before))
    expected = [(2, 80), (3, 30), (3, 128), (3, 128), (6, 44 + 2), (8, 120), (9, 59)]  # 300 = 128 + 128 + 44
    assert seen == expected


def test_bounded_cache_keeps_outputs_and_memory_limit(tiny_models):
    """Long requests among short ones: they wait for room, and what the longest took is given back."""
    shapes = [(5, 20), (200, 60), (5, 20), (30, 90), (5, 20), (400, None), (5, 20)]
    requests = [request(None, length=length, max_tokens=new, seed=i) for i, (length, new) in enumerate(shapes)]

    def run(core: NativeEngineCore) -> tuple[list, int]:
        for one in requests:
            core.add_request(one)
        done, most = {}, 0
        while core.num_running or core.num_waiting:
            done |= core.step()
            most = max(most, core._cache.num_rows * core._cache.length)
        return [(done[one].token_ids, done[one].log_probs) for one in requests], most

    answers, most = run(make_core(tiny_models("qwen2"), max_num_seqs=32))
    assert most == 8 * 512
    within, most = run(make_core(tiny_models("qwen2"), max_num_seqs=32, max_cache_tokens=2500))
    assert within == answers and most <= 2500
    alone, most = run(make_core(tiny_models("qwen2"), max_num_seqs=32, max_cache_tokens=100))
    assert alone == answers and most == 4 * 512  # even one is too much: one at a time
