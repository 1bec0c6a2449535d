"""How a thing that several want is shared out: whoever has had least is next. Knows no clock and no orders.

Each tenant has a counter of what it was given. One who comes (back) when others are at it starts level with the one of
them who has had least: an idle hour is no credit, and what was taken in excess before is still owed.
"""

from collections.abc import Collection


class Shares:
    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._active: set[str] = set()

    def begin(self, tenants: Collection[str]) -> None:
        """Says who wants something now; those not named are idle."""
        staying = self._active.intersection(tenants)
        floor = min((self._given[tenant] for tenant in staying), default=None)
        if floor is None:
            floor = max((self._given.get(tenant, 0.0) for tenant in tenants), default=0.0)
        for tenant in tenants:
            if tenant not in staying:
                self._given[tenant] = max(self._given.get(tenant, 0.0), floor)
        self._active = set(tenants)

    def given(self, tenant: str) -> float:
        return self._given.get(tenant, 0.0)

    def charge(self, tenant: str, amount: float) -> None:
        self._given[tenant] = self._given.get(tenant, 0.0) + amount
