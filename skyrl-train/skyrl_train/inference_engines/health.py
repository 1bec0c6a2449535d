"""State machine of an engine's health, independent of engines.

The table maps a state and an event to the next state. The supervisor generates the events:

```text
 starting ──started──> healthy <──answered/silent──> suspect
    │                  │  ^                             │
 start failed        died │ weights given     died, silent too long
    v                  v  │                             v
   lost <──refused── dead │ ─────────────────────────> dead
                       │ restart granted
                       v
                  restarting ──started──> waiting for weights
```
"""

from enum import StrEnum


class Health(StrEnum):
    """State of an engine."""

    STARTING = "starting"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Health check overdue: keeps its requests and sessions, but gets no new ones while other engines are healthy."""
    DEAD = "dead"
    RESTARTING = "restarting"
    WAITING_FOR_WEIGHTS = "waiting for weights"
    """Restarted, but with old weights: gets no requests yet."""
    LOST = "lost"
    """Not restarted: all engines fail."""


class HealthEvent(StrEnum):
    """Event that changes the state of an engine."""

    STARTED = "started"
    START_FAILED = "start failed"
    ANSWERED = "answered"
    SILENT = "silent"
    SILENT_TOO_LONG = "silent too long"
    DIED = "died"
    RESTART_GRANTED = "restart granted"
    RESTART_REFUSED = "restart refused"
    WEIGHTS_GIVEN = "weights given"


TRANSITIONS: dict[Health, dict[HealthEvent, Health]] = {
    Health.STARTING: {HealthEvent.STARTED: Health.HEALTHY, HealthEvent.START_FAILED: Health.LOST},
    Health.HEALTHY: {
        HealthEvent.ANSWERED: Health.HEALTHY,
        HealthEvent.SILENT: Health.SUSPECT,
        # A check that began before it received weights.
        HealthEvent.SILENT_TOO_LONG: Health.DEAD,
        HealthEvent.DIED: Health.DEAD,
    },
    Health.SUSPECT: {
        HealthEvent.ANSWERED: Health.HEALTHY,
        HealthEvent.SILENT: Health.SUSPECT,
        HealthEvent.SILENT_TOO_LONG: Health.DEAD,
        HealthEvent.DIED: Health.DEAD,
    },
    Health.DEAD: {HealthEvent.RESTART_GRANTED: Health.RESTARTING, HealthEvent.RESTART_REFUSED: Health.LOST},
    Health.RESTARTING: {
        HealthEvent.STARTED: Health.WAITING_FOR_WEIGHTS,
        HealthEvent.START_FAILED: Health.DEAD,
    },
    Health.WAITING_FOR_WEIGHTS: {
        HealthEvent.ANSWERED: Health.WAITING_FOR_WEIGHTS,
        HealthEvent.SILENT: Health.WAITING_FOR_WEIGHTS,
        HealthEvent.SILENT_TOO_LONG: Health.DEAD,
        HealthEvent.DIED: Health.DEAD,
        HealthEvent.WEIGHTS_GIVEN: Health.HEALTHY,
    },
    Health.LOST: {},
}

ROUTED = (Health.HEALTHY, Health.SUSPECT)
UP = (*ROUTED, Health.WAITING_FOR_WEIGHTS)


def get_next_state(health: Health, event: HealthEvent) -> Health:
    """Return the next state. Raises ValueError if the event cannot happen in this state."""
    if event not in TRANSITIONS[health]:
        raise ValueError(f"an engine that is {health} cannot have the event '{event}'")
    return TRANSITIONS[health][event]
