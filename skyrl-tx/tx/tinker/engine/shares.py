"""Fair shares: the tenant that received least is next.

Each tenant has a counter of what it received. A tenant that becomes active starts level with the active one that
received least: idle time earns no credit, and earlier excess still counts.
"""

from collections.abc import Collection


class Shares:
    """Counters of what each tenant received."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._active: set[str] = set()

    def begin(self, tenants: Collection[str]) -> None:
        """Set the active tenants; all others are idle."""
        staying = self._active.intersection(tenants)
        floor = min((self._given[tenant] for tenant in staying), default=None)
        if floor is None:
            floor = max((self._given.get(tenant, 0.0) for tenant in tenants), default=0.0)
        for tenant in tenants:
            if tenant not in staying:
                self._given[tenant] = max(self._given.get(tenant, 0.0), floor)
        self._active = set(tenants)

    def received(self, tenant: str) -> float:
        return self._given.get(tenant, 0.0)

    def charge(self, tenant: str, amount: float) -> None:
        """Add to what a tenant received."""
        self._given[tenant] = self._given.get(tenant, 0.0) + amount
