"""Growth a second."""

from tx.tinker.http.rates import Rates


def test_a_rate_is_the_growth_between_two_looks():
    rates = Rates()
    assert rates.look({"tokens": 100}, now=10.0) == {}
    assert rates.look({"tokens": 150, "new": 5}, now=15.0) == {"tokens": 10.0, "new": 1.0}
    assert rates.look({"tokens": 999}, now=15.5) == {"tokens": 10.0, "new": 1.0}  # too soon
    assert rates.look({"tokens": 20}, now=25.0) == {"tokens": 2.0}  # a new engine counts from zero
