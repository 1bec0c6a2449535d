import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_gym.graders import InfraError, Score, Timeout, reward_of
from skyrl_gym.graders.math import EquivalencePool, grade_equivalence

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def pool():
    pool = EquivalencePool(num_processes=2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def hasty_pool():
    pool = EquivalencePool(num_processes=1, cpu_seconds=1.0)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "gold, answer",
    [
        ("x", "9^{9^{9^9}}"),
        ("x", "7" * 100_000),
        pytest.param("x", r"\frac{1}{" * 90 + "1" + "}" * 90, marks=pytest.mark.slow),
        pytest.param("x", "(" * 450 + "1" + ")" * 450, marks=pytest.mark.slow),
        pytest.param("x^5-x-1=0", "x^{55}-x-1=0", marks=pytest.mark.slow),
        pytest.param("x", "(x+1)^{5000}", marks=pytest.mark.slow),
    ],
)
def test_every_answer_is_graded_in_bounded_time(hasty_pool, gold, answer):
    started = time.perf_counter()
    assert reward_of(grade_equivalence(answer, gold, pool=hasty_pool)) == 0.0
    assert time.perf_counter() - started < 60  # the bound is of CPU time; the machine may be busy
    assert grade_equivalence("3+2x", "2x+3", pool=hasty_pool) == Score(
        1.0, "3+2x"
    )  # the next one does not suffer for it


def test_answer_that_hangs_sympy_times_out(hasty_pool):
    grade = grade_equivalence("9^{9^{9^8}}", "9^{9^{9^9}}", pool=hasty_pool)
    assert grade == Timeout(1.0, "comparing the answer")


def test_many_threads_share_few_processes(pool):
    with ThreadPoolExecutor(32) as threads:
        grades = list(threads.map(lambda n: pool.compare(f"{n}+x", f"x+{n}"), range(100)))
    assert grades == [Score(1.0)] * 100
    assert len(pool._alive) <= 2


def test_killed_process_returns_infra_error_once(pool):
    assert pool.compare("x+1", "1+x") == Score(1.0)
    for process in list(pool._alive):
        os.kill(process._process.pid, signal.SIGKILL)
    grades = [pool.compare("x+1", "1+x") for _ in range(3)]
    assert [isinstance(grade, InfraError) for grade in grades].count(True) <= 2  # of two processes
    assert grades[-1] == Score(1.0)


@pytest.mark.parametrize("python", ["/nonexistent/python", "/bin/false"])
def test_unstartable_process_returns_infra_error(python):
    pool = EquivalencePool(num_processes=1, python=python)
    grade = grade_equivalence("3+2x", "2x+3", pool=pool)
    pool.close()
    assert isinstance(grade, InfraError) and "cannot start" in str(grade)
    with pytest.raises(InfraError):
        reward_of(grade)


PARENT = """
import sys, time
from skyrl_gym.graders.math import default_pool, grade_equivalence
print(grade_equivalence("3+2x", "2x+3").value, *(process._process.pid for process in default_pool()._alive), flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("kill", [False, True], ids=["parent ends", "parent is killed"])
def test_processes_exit_with_parent(kill):
    command = [sys.executable, "-W", "error", "-c", PARENT, "60" if kill else "0"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    value, worker = parent.stdout.readline().split()
    if kill:
        parent.kill()
    _, errors = parent.communicate(timeout=60)
    assert (value, errors) == ("1.0", "")
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}")


LARGE_PARENT = """
from skyrl_gym.graders.math import EquivalencePool
from skyrl_gym.graders.math_worker import WORN_BYTES
ballast = b"x" * (WORN_BYTES + (64 << 20))
pool = EquivalencePool(num_processes=1)
pids = set()
for n in range(2, 5):
    assert pool.compare(f"{n}+x", f"x+{n}").value == 1.0
    pids.update(process._process.pid for process in pool._alive)
pool.close()
print(len(pids))
"""


@pytest.mark.slow
def test_process_survives_memory_use_of_parent():
    done = subprocess.run([sys.executable, "-c", LARGE_PARENT], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("1\n", "")


FORKING = """
import multiprocessing
from skyrl_gym.graders.math import default_pool, grade_equivalence
def play(n):
    grades = [grade_equivalence(f"{n}+{k}x", f"{k}x+{n}").value for k in range(2, 12)]
    return sum(grades), [process._process.pid for process in default_pool()._alive]
score, ours = play(0)
with multiprocessing.get_context("fork").Pool(1) as children:
    (their_score, theirs), = children.map(play, [1])
print(score + their_score + play(2)[0], set(ours) & set(theirs))
"""


@pytest.mark.slow
def test_forked_process_has_separate_pool():
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("30.0 set()\n", "")
