"""The end of an engine. These checks come last: it is of no use afterwards."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from skyrl_train.errors import SkyRLError
from skyrl_train_testing.engine_conformance.registry import check, check_raises
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest


@check(ends_engine=True)
async def check_teardown(subject: EngineUnderTest) -> None:
    """Requests, control calls and `check_health` fail with a named error after `teardown`; repeated teardown is
    harmless.
    """
    running = subject.begin_long()
    await subject.in_time(subject.engine.teardown())
    with contextlib.suppress(SkyRLError):  # or it was quick enough
        await subject.in_time(running)
    request = subject.request(subject.prompt(3), max_tokens=2)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "generate": lambda: subject.engine.generate(request),
        "check_health": subject.engine.check_health,
        "weight_version": subject.engine.weight_version,
    }
    for what, call in calls.items():
        await check_raises(SkyRLError, subject.in_time(call()), f"{what} after teardown")
    await subject.in_time(subject.engine.teardown())
