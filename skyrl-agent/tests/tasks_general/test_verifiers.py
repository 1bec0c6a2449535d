"""Graders under their published names."""

import pytest

from skyrl_agent.errors import TaskRowError
from skyrl_agent.tasks.verifiers import coder1, naive_dapo, qa, torl


def test_short_answers_are_graded():
    assert qa.compute_score_em("It is \\boxed{the Paris}", {"target": ["paris"]}) == {"score": 1.0}
    assert qa.compute_score_em("Rome", {"target": "Paris"}) == {"score": 0.0}
    assert qa.compute_score_f1("red green", {"target": ["red blue", "x"]}) == {"score": 0.5}
    with pytest.raises(TaskRowError, match="target"):
        qa.compute_score_em("Rome", {"target": []})


@pytest.mark.parametrize("module", [naive_dapo, torl])
def test_math_answers_are_graded(module):
    assert module.compute_score("<think>\\boxed{7}</think>So \\boxed{0012}", "12")["score"] == 1.0
    assert module.compute_score("\\boxed{13}", "12") == {"score": 0.0, "acc": False, "pred": "13"}


def test_math_answers_are_compared_by_value():
    assert naive_dapo.compute_score("\\boxed{\\frac{\\pi}{2}}", "\\pi/2")["acc"]


@pytest.mark.usefixtures("needs_sandbox")
def test_programs_are_graded():
    assert (
        coder1.compute_score("```python\ndef f(x):\n    return x\n```", {"functional": "assert f(2) == 2"})["score"]
        == 1.0
    )
    with pytest.raises(TaskRowError, match="must be JSON"):
        coder1.compute_score("pass", "no json")
