"""Tokens per minute of each tenant."""

import time
from collections import Counter
from collections.abc import Callable

from tx.errors import Busy, RequestError

MOST_MINUTES = 4
"""Largest request, in minutes of the quota: clients wait for at most five minutes until it is accepted."""
LONGEST_RETRY_SECONDS = 60.0
"""Clients ignore `Retry-After` above this."""


class TokenQuota:
    """Token bucket for each tenant with the capacity of one minute. A request is admitted unless the bucket is empty;
    one larger than the remainder leaves a debt, which later requests wait for.

    Args:
        per_minute: tokens; None: no limit
        now: seconds
    """

    def __init__(self, per_minute: int | None, now: Callable[[], float] = time.monotonic):
        self._per_minute, self._now = per_minute, now
        self._used: dict[str, tuple[float, float]] = {}
        """Tokens not yet forgotten, and when that was."""
        self.refusals: Counter[str] = Counter()

    def get_remaining(self, tenant: str) -> float:
        """Return the tokens in the bucket; below 0, the debt."""
        return float("inf") if self._per_minute is None else self._per_minute - self._get_used(tenant)

    def get_all_remaining(self) -> dict[str, float]:
        """Return the tokens left by tenant, of those that used some."""
        return {tenant: self.get_remaining(tenant) for tenant in self._used}

    def admit(self, tenant: str) -> None:
        """Raise Busy if the bucket is empty."""
        left = self.get_remaining(tenant)
        if left <= 0:
            assert self._per_minute is not None
            self.refuse(tenant, 60 * (1 - left) / self._per_minute)

    def refuse(self, tenant: str, seconds: float) -> None:
        """Raise Busy, with the time to wait."""
        self.refusals[tenant] += 1
        raise Busy(
            f"this key has used its {self._per_minute:,} tokens per minute (max_tokens_per_minute_per_tenant of the "
            f"server); retry in {seconds:.0f} s",
            min(max(seconds, 1.0), LONGEST_RETRY_SECONDS),
        )

    def check_size(self, tokens: int) -> None:
        """Raise RequestError for data that are too large ever to be accepted in time."""
        if self._per_minute is not None and tokens > MOST_MINUTES * self._per_minute:
            raise RequestError(
                f"data has {tokens:,} tokens, but this key may use {self._per_minute:,} per minute "
                f"(max_tokens_per_minute_per_tenant of the server): send at most the tokens of {MOST_MINUTES} minutes "
                "per request"
            )

    def charge(self, tenant: str, tokens: int) -> None:
        """Take tokens out; negative ones are given back."""
        if self._per_minute is not None:
            self._used[tenant] = (max(0.0, self._get_used(tenant) + tokens), self._now())

    def _get_used(self, tenant: str) -> float:
        assert self._per_minute is not None
        used, since = self._used.get(tenant, (0.0, 0.0))
        return max(0.0, used - (self._now() - since) * self._per_minute / 60)
