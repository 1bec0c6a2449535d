"""All checks, in the order in which they are run: importing this fills `checks.CHECKS`."""

from tx_conformance import (
    checkpoints,
    life_cycle,
    listings,
    losses,
    optimizer,
    ordering,
    refusals,
    sampling,
    tenants,
    training,
)
from tx_conformance.checks import CHECKS as CHECKS

GROUPS = [
    module.__name__.rsplit(".", 1)[-1]
    for module in (
        life_cycle,
        training,
        losses,
        optimizer,
        checkpoints,
        sampling,
        ordering,
        listings,
        refusals,
        tenants,
    )
]
CHECKS.sort(key=lambda check: GROUPS.index(check.group))
