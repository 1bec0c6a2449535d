"""Who has the shared device when: the states, the legal steps, and what is missing for others. Pure tables.

The device holds either engines that generate or one model that is computed with. In between stands the sync, where the
policy and the engines' weights are on it together, but no cache of keys and values:

```text
    step                      engines         on the device
    generate                  awake           [ weights | keys and values ]
    sleep                     asleep          -
    bring, use, take off ref  asleep          [ ref ]
    the same of the critic    asleep          [ critic ]
    bring policy, use policy  asleep          [ policy ]
    wake weights              weights only    [ weights ] [ policy ]
    send weights              weights only    [ weights ] [ policy ]
    take off policy           weights only    [ weights ]
    wake cache                awake           [ weights | keys and values ]     and so on
```

Whatever else is asked for is a `ColocationError` that says what must come first. What has a device of its own takes no
turns: its steps do nothing and are never refused. Policy and reference model may have one device for the two of them
(`colocate_policy_ref`) while engines have theirs.
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
    """A step of the colocation protocol was asked for out of turn. The text says what must come first."""


class Engines(StrEnum):
    """What the engines have on the device."""

    AWAKE = "awake"
    WEIGHTS_ONLY = "awake by their weights only"
    ASLEEP = "asleep"


@dataclass(frozen=True)
class DeviceState:
    """What is on the shared device.

    Raises:
        ValueError: it has no room for that: a worker beside engines that are awake, or another than the policy beside
            their weights.
    """

    engines: Engines
    worker: Worker | None = None

    def __post_init__(self) -> None:
        beside = {Engines.AWAKE: (None,), Engines.WEIGHTS_ONLY: (None, "policy"), Engines.ASLEEP: (None, *WORKERS)}
        if self.worker not in beside[self.engines]:
            raise ValueError(f"the device has no room for the {self.worker} beside engines that are {self.engines}")

    def __str__(self) -> str:
        return f"engines {self.engines}, {f'the {self.worker}' if self.worker else 'no worker'} on the device"


Event = str
"""A step: `generate`, `sleep`, `wake weights`, `wake cache`, `send weights`, `start engine`, and of each worker `bring
W`, `use W`, `take off W`."""

Steps = Mapping[DeviceState, Mapping[Event, DeviceState]]
"""A protocol: state -> each legal event -> the state that follows."""

EMPTY = DeviceState(Engines.ASLEEP)
ALONE_AWAKE = DeviceState(Engines.AWAKE)
WEIGHTS = DeviceState(Engines.WEIGHTS_ONLY)
SYNC = DeviceState(Engines.WEIGHTS_ONLY, "policy")
POLICY = DeviceState(Engines.ASLEEP, "policy")


def _steps_of_workers(workers: Sequence[Worker]) -> dict[DeviceState, dict[Event, DeviceState]]:
    """One after the other on a device without engines."""
    steps: dict[DeviceState, dict[Event, DeviceState]] = {EMPTY: {}}
    for worker in workers:
        at_work = DeviceState(Engines.ASLEEP, worker)
        steps[EMPTY][f"bring {worker}"] = at_work
        steps[at_work] = {f"use {worker}": at_work, f"take off {worker}": EMPTY}
    return steps


def _steps_of_all() -> Steps:
    steps = _steps_of_workers(WORKERS)
    steps[EMPTY] |= {"wake weights": WEIGHTS}
    steps[POLICY] |= {"wake weights": SYNC}
    steps[SYNC] = {"send weights": SYNC, "take off policy": WEIGHTS, "sleep": POLICY}
    steps[WEIGHTS] = {"wake cache": ALONE_AWAKE, "bring policy": SYNC, "sleep": EMPTY}
    steps[ALONE_AWAKE] = {"generate": ALONE_AWAKE, "sleep": EMPTY}
    for state in (EMPTY, WEIGHTS, ALONE_AWAKE):
        steps[state] |= {"start engine": state}
    return steps


def _steps_of_policy_and_ref() -> Steps:
    """The engines are elsewhere, and count as asleep on this device."""
    steps = _steps_of_workers(("policy", "ref"))
    steps[POLICY] |= {"send weights": POLICY}
    return steps


ALL_SHARE: Steps = _steps_of_all()
POLICY_AND_REF_SHARE: Steps = _steps_of_policy_and_ref()
NOBODY_SHARES: Steps = {EMPTY: {}}


def events_of(protocol: Steps) -> tuple[Event, ...]:
    return tuple(dict.fromkeys(event for legal in protocol.values() for event in legal))


def after(state: DeviceState, event: Event, protocol: Steps = ALL_SHARE) -> DeviceState:
    """The state that follows.

    Raises:
        ColocationError: the event is out of turn; names the shortest way to where it is not.
    """
    if event not in protocol[state]:
        first = ", ".join(missing_steps(state, event, protocol))
        raise ColocationError(f"cannot {event} with {state}; first: {first}")
    return protocol[state][event]


def missing_steps(state: DeviceState, event: Event, protocol: Steps = ALL_SHARE) -> tuple[Event, ...]:
    """The fewest steps from a state to one in which `event` is legal.

    Raises:
        ValueError: it is legal nowhere.
    """
    ways: deque[tuple[DeviceState, tuple[Event, ...]]] = deque([(state, ())])
    seen = {state}
    while ways:
        here, way = ways.popleft()
        if event in protocol[here]:
            return way
        for step, following in protocol[here].items():
            if following not in seen:
                seen.add(following)
                ways.append((following, (*way, step)))
    raise ValueError(f"no step of this protocol: {event!r}; there are {', '.join(events_of(protocol))}")
