"""Limits on requests under way."""

import pytest

from tx.errors import Busy
from tx.tinker.service.limits import Limits
from tx.tinker.service.quotas import TokenQuota


def test_tenant_request_limit_applies_per_kind():
    limits = Limits(max_pending=2, max_sample_tokens=1000)
    for _ in range(2):
        limits.admit_training("a")
        limits.enter("a", None)
    with pytest.raises(Busy, match="2 training requests"):
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
        ({"a": 900}, "b", 500, True),  # a tenant without requests in flight is admitted
        ({"a": 900, "b": 100}, "b", 400, True),  # together too much, but b is below its half
        ({"a": 900, "b": 100}, "b", 401, False),
        ({"a": 900, "b": 100}, "a", 1, False),
        ({"a": 500, "b": 400, "c": 300}, "c", 33, True),  # a third
        ({"a": 500, "b": 400, "c": 300}, "c", 34, False),
    ],
)
def test_samples_of_all_tenants_share_token_limit(under_way, tenant, tokens, admitted):
    limits = Limits(max_pending=10, max_sample_tokens=1000)
    for other, count in under_way.items():
        limits.enter(other, count)
    if admitted:
        limits.admit_sample(tenant, tokens)
    else:
        with pytest.raises(Busy):
            limits.admit_sample(tenant, tokens)


def test_token_rate_refills_and_sample_returns_unused_tokens():
    seconds = [0.0]
    limits = Limits(max_pending=9, max_sample_tokens=10_000, quota=TokenQuota(600, lambda: seconds[0]))
    limits.admit_sample("a", 1000)  # larger than what is left: a debt
    limits.enter("a", 1000)
    with pytest.raises(Busy, match=r"600 tokens per minute .* 40 s") as busy:
        limits.admit_sample("a", 1)
    assert 40 < busy.value.retry_after_seconds <= 41
    limits.admit_sample("b", 1000)
    limits.leave("a", 1000, used=450)
    assert limits.quota.get_all_remaining() == {"a": 150.0}
    limits.quota.charge("a", 1750)
    with pytest.raises(Busy) as busy:
        limits.quota.admit("a")
    assert busy.value.retry_after_seconds == 60.0, "clients ignore more"
    seconds[0] += 1000
    assert limits.quota.get_remaining("a") == 600.0
    assert limits.quota.refusals == {"a": 2}


def test_finished_requests_are_forgotten():
    limits = Limits(max_pending=1, max_sample_tokens=10)
    limits.enter("a", 10)
    limits.leave("a", 10)
    assert not limits.samples and not limits.sample_tokens
