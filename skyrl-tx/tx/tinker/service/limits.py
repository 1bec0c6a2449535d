"""Limits of pending requests per tenant and of pending sample tokens."""

from collections import Counter

from tx.errors import Busy
from tx.tinker.service.quotas import TokenQuota

RETRY_SECONDS = 1.0


class Limits:
    """
    Args:
        max_pending: requests of a tenant, training and samples each
        max_sample_tokens: of all samples; beyond it, only tenants below an equal share may add
        quota: tokens per minute
    """

    def __init__(self, max_pending: int, max_sample_tokens: int, quota: TokenQuota | None = None):
        self.quota = quota or TokenQuota(None)
        self.max_pending, self.max_sample_tokens = max_pending, max_sample_tokens
        self.training: Counter[str] = Counter()
        self.samples: Counter[str] = Counter()
        self.sample_tokens: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()

    def admit_training(self, tenant: str) -> None:
        """Check the limit of training requests. Raises: Busy."""
        if self.training[tenant] >= self.max_pending:
            self._raise_busy(
                tenant,
                f"{self.training[tenant]} training requests are already waiting; the maximum is {self.max_pending}",
            )

    def admit_sample(self, tenant: str, tokens: int) -> None:
        """Check the limits of samples, of sample tokens and of tokens per minute. Raises: Busy."""
        self.quota.admit(tenant)
        if self.samples[tenant] >= self.max_pending:
            self._raise_busy(
                tenant, f"{self.samples[tenant]} samples are already waiting; the maximum is {self.max_pending}"
            )
        own, total = self.sample_tokens[tenant], self.sample_tokens.total()
        others = sum(1 for other, count in self.sample_tokens.items() if count and other != tenant)
        share = self.max_sample_tokens / (others + 1)
        if own and total + tokens > self.max_sample_tokens and own + tokens > share:
            self._raise_busy(
                tenant,
                f"samples of {own} tokens are already waiting; the share of one of {others + 1} tenants "
                f"is {int(share)}",
            )

    def enter(self, tenant: str, tokens: int | None) -> None:
        """Count a request. Args: tokens: of a sample, at most; None for a training request."""
        self._count(tenant, tokens, 1)
        self.quota.charge(tenant, tokens or 0)

    def leave(self, tenant: str, tokens: int | None, used: int = 0) -> None:
        """Remove a finished request from the counts. Args: used: tokens that a sample really has."""
        self._count(tenant, tokens, -1)
        if tokens is not None:
            self.quota.charge(tenant, used - tokens)

    def _count(self, tenant: str, tokens: int | None, sign: int) -> None:
        changes = [(self.training, 1)] if tokens is None else [(self.samples, 1), (self.sample_tokens, tokens)]
        for counter, amount in changes:
            counter[tenant] += sign * amount
            if not counter[tenant]:
                del counter[tenant]

    def _raise_busy(self, tenant: str, why: str) -> None:
        self.refusals[tenant] += 1
        raise Busy(why, RETRY_SECONDS)
