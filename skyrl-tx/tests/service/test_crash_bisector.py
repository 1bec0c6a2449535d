"""The one piece of work that kills the engine is found, and only it pays."""

import random

import pytest

from tx.tinker.service.crash_bisector import DEATHS_TO_BE_SUSPECTED, CrashBisector


def run(work: list[str], deadly: set[str], seed: int = 0, restarts: bool = False) -> tuple[list[str], list[str], int]:
    """An engine that does what it may, in any order, and dies of deadly work, or after finishing some.

    Args:
        restarts: after each death only the numbers of deaths are remembered

    Returns:
        completed items, items identified as culprits, number of engine crashes
    """
    suspects, draw = CrashBisector[str](), random.Random(seed)
    done, culprit_request, deaths = [], [], 0
    while left := [w for w in work if w not in done and w not in culprit_request]:
        running = [w for w in left if suspects.may_run(w)]
        assert running, "no item may run"
        killers = [w for w in running if w in deadly]
        finished = [w for w in running if w not in deadly]
        if killers:
            finished = draw.sample(finished, draw.randint(0, min(1, len(finished))))
        for w in finished:
            suspects.finished(w)
            done.append(w)
        if killers:
            deaths += 1
            found = suspects.record_crash([w for w in running if w not in done])
            culprit_request += [found] if found else []
            if restarts:
                before, suspects = suspects.deaths, CrashBisector[str]()
                suspects.restore(before)
    return done, culprit_request, deaths


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("deadly", [{"w0"}, {"w7"}, {"w3", "w4"}, set()])
@pytest.mark.parametrize("restarts", [False, True])
def test_all_requests_complete_except_deadly(deadly, seed, restarts):
    work = [f"w{i}" for i in range(16)]
    done, culprit_request, _ = run(work, deadly, seed, restarts)
    assert (set(culprit_request), set(done)) == (deadly, set(work) - deadly)


def test_crash_bisector_finds_culprit_of_1024_in_dozen_crashes():
    work = [f"w{i}" for i in range(1024)]
    assert run(work, {"w777"})[2] <= DEATHS_TO_BE_SUSPECTED + 11
    assert run(["only"], {"only"}) == ([], ["only"], 5)


def test_few_or_unattributed_deaths_are_accidents():
    suspects = CrashBisector[str]()
    for _ in range(5):
        assert suspects.record_crash([]) is None
    assert suspects.may_run("anything")
    for _ in range(DEATHS_TO_BE_SUSPECTED - 1):
        suspects.record_crash(["a", "b"])
        assert suspects.may_run("a") and suspects.may_run("c")
    suspects.finished("a")
    suspects.record_crash(["b", "c"])
    assert (suspects.may_run("b"), suspects.may_run("c")) == (True, False), "b saw one death more"
