"""Protocol of the device shared by engines and workers: states, legal events, and the events missing before illegal
ones.

Pure tables. The device holds either generating engines or one computing model. During a sync, in between, it holds the
policy and the engines' weights, but no KV cache:

```text
    event                       engines         on the device
    generate                    awake           [ weights | keys and values ]
    sleep                       asleep          -
    onload, use, offload ref    asleep          [ ref ]
    the same of the critic      asleep          [ critic ]
    onload policy, use policy   asleep          [ policy ]
    wake weights                weights only    [ weights ] [ policy ]
    send weights                weights only    [ weights ] [ policy ]
    offload policy              weights only    [ weights ]
    wake cache                  awake           [ weights | keys and values ]     and so on
```

Any other order raises a `ColocationError` that names the missing events. A model or engine with a separate device has
no events: its moves have no effect and are never refused. Policy and reference model may share a device
(`colocate_policy_ref`) separate from the engines.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from skyrl_train.errors import SkyRLError

Worker = Literal["policy", "critic", "ref"]
WORKERS: tuple[Worker, ...] = ("policy", "critic", "ref")


class ColocationError(SkyRLError):
    """Event that the colocation protocol does not allow in this state. The message names the events that must come
    first."""


class Engines(StrEnum):
    """Memory of the engines on the device."""

    AWAKE = "awake"
    WEIGHTS_ONLY = "awake with weights only"
    ASLEEP = "asleep"


@dataclass(frozen=True)
class DeviceState:
    """Contents of the shared device.

    Raises:
        ValueError: an invalid combination: a worker with awake engines, or a worker other than the policy with the
            engines' weights.
    """

    engines: Engines
    worker: Worker | None = None

    def __post_init__(self) -> None:
        beside = {Engines.AWAKE: (None,), Engines.WEIGHTS_ONLY: (None, "policy"), Engines.ASLEEP: (None, *WORKERS)}
        if self.worker not in beside[self.engines]:
            raise ValueError(f"the device has no memory for the {self.worker} while engines are {self.engines}")

    def __str__(self) -> str:
        return f"engines {self.engines}, {f'the {self.worker}' if self.worker else 'no worker'} on the device"


Event = str
"""Event: `generate`, `sleep`, `wake weights`, `wake cache`, `send weights`, `start engine`, and for each worker
`onload W`, `use W`, `offload W`."""

Transitions = Mapping[DeviceState, Mapping[Event, DeviceState]]
"""Protocol: state -> each legal event -> next state."""

EMPTY = DeviceState(Engines.ASLEEP)
ENGINES_ONLY = DeviceState(Engines.AWAKE)
WEIGHTS = DeviceState(Engines.WEIGHTS_ONLY)
SYNC = DeviceState(Engines.WEIGHTS_ONLY, "policy")
POLICY = DeviceState(Engines.ASLEEP, "policy")


def _build_worker_steps(workers: Sequence[Worker]) -> dict[DeviceState, dict[Event, DeviceState]]:
    """Return the transitions of workers that alternate on a device without engines."""
    steps: dict[DeviceState, dict[Event, DeviceState]] = {EMPTY: {}}
    for worker in workers:
        at_work = DeviceState(Engines.ASLEEP, worker)
        steps[EMPTY][f"onload {worker}"] = at_work
        steps[at_work] = {f"use {worker}": at_work, f"offload {worker}": EMPTY}
    return steps


def _build_all_steps() -> Transitions:
    steps = _build_worker_steps(WORKERS)
    steps[EMPTY] |= {"wake weights": WEIGHTS}
    steps[POLICY] |= {"wake weights": SYNC}
    steps[SYNC] = {"send weights": SYNC, "offload policy": WEIGHTS, "sleep": POLICY}
    steps[WEIGHTS] = {"wake cache": ENGINES_ONLY, "onload policy": SYNC, "sleep": EMPTY}
    steps[ENGINES_ONLY] = {"generate": ENGINES_ONLY, "sleep": EMPTY}
    for state in (EMPTY, WEIGHTS, ENGINES_ONLY):
        steps[state] |= {"start engine": state}
    return steps


def _build_policy_and_ref_steps() -> Transitions:
    """Return the transitions of a device shared by policy and reference model. The engines use another device and count
    as asleep on this one."""
    steps = _build_worker_steps(("policy", "ref"))
    steps[POLICY] |= {"send weights": POLICY}
    return steps


ALL_SHARE: Transitions = _build_all_steps()
POLICY_AND_REF_SHARE: Transitions = _build_policy_and_ref_steps()
NO_SHARING: Transitions = {EMPTY: {}}


def events_of(protocol: Transitions) -> tuple[Event, ...]:
    """Return all events of a protocol."""
    return tuple(dict.fromkeys(event for legal in protocol.values() for event in legal))


def next_state(state: DeviceState, event: Event, protocol: Transitions = ALL_SHARE) -> DeviceState:
    """Return the state after an event.

    Raises:
        ColocationError: the event is illegal; names the shortest path to a state in which it is legal.
    """
    if event not in protocol[state]:
        first = ", ".join(missing_steps(state, event, protocol))
        raise ColocationError(f"cannot {event} with {state}; first: {first}")
    return protocol[state][event]


def missing_steps(state: DeviceState, event: Event, protocol: Transitions = ALL_SHARE) -> tuple[Event, ...]:
    """Return the shortest sequence of events from a state to one in which `event` is legal.

    Raises:
        ValueError: it is legal in no state.
    """
    paths: deque[tuple[DeviceState, tuple[Event, ...]]] = deque([(state, ())])
    seen = {state}
    while paths:
        current, path = paths.popleft()
        if event in protocol[current]:
            return path
        for step, following in protocol[current].items():
            if following not in seen:
                seen.add(following)
                paths.append((following, (*path, step)))
    raise ValueError(f"unknown event of this protocol: {event!r}; known events: {', '.join(events_of(protocol))}")
