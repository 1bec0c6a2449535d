"""Limits on requests under way."""

import pytest

from tx.errors import Busy
from tx.tinker.service.limits import Limits


def test_a_tenant_has_so_many_requests_of_each_kind():
    limits = Limits(max_pending=2, max_sample_tokens=1000)
    for _ in range(2):
        limits.admit_training("a")
        limits.enter("a", None)
    with pytest.raises(Busy, match="2 training requests wait already; the most is 2"):
        limits.admit_training("a")
    limits.admit_training("b")
    limits.admit_sample("a", 10)
    limits.leave("a", None)
    limits.admit_training("a")
    assert limits.refusals == {"a": 1}


@pytest.mark.parametrize(
    "under_way, tenant, tokens, admitted",
    [
        ({}, "a", 5000, True),  # one that is larger than the limit alone: else it would never be done
        ({"a": 900}, "a", 100, True),
        ({"a": 900}, "a", 101, False),
        ({"a": 900}, "b", 500, True),  # whoever has nothing under way may begin
        ({"a": 900, "b": 100}, "b", 400, True),  # together too much, but b is below its half
        ({"a": 900, "b": 100}, "b", 401, False),
        ({"a": 900, "b": 100}, "a", 1, False),
        ({"a": 500, "b": 400, "c": 300}, "c", 33, True),  # a third
        ({"a": 500, "b": 400, "c": 300}, "c", 34, False),
    ],
)
def test_samples_of_all_share_a_number_of_tokens(under_way, tenant, tokens, admitted):
    limits = Limits(max_pending=10, max_sample_tokens=1000)
    for other, count in under_way.items():
        limits.enter(other, count)
    if admitted:
        limits.admit_sample(tenant, tokens)
    else:
        with pytest.raises(Busy):
            limits.admit_sample(tenant, tokens)


def test_finished_requests_are_forgotten():
    limits = Limits(max_pending=1, max_sample_tokens=10)
    limits.enter("a", 10)
    limits.leave("a", 10)
    assert not limits.samples and not limits.sample_tokens
