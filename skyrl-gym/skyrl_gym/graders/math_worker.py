r"""The process in which math-verify compares answers: `python -m skyrl_gym.graders.math_worker`.

Says `{"ready": true}`, then answers each line `{"answer": str, "gold": str, "cpu_seconds": float}` on standard input by
one line `{"same": bool, "worn": bool}`, and ends with its input. Algebra on an answer may need any time and memory: the
kernel ends the process (SIGXCPU) when a comparison has used up its CPU seconds, also inside one long operation and also
if nobody waits for it any more.
"""

import contextlib
import json
import logging
import math
import os
import resource
import sys
import time
from typing import Any

MEMORY_BYTES = 2 << 30
"""Address space of the process."""

WORN_BYTES = 1 << 30
"""Resident memory after which the process asks to be replaced, before innocent answers fail for want of it."""

SMALLEST_COMPARED_ABSOLUTELY = 1e-3
RELATIVE_TOLERANCE = 1e-3
"""math-verify compares to six decimals or 15 digits after the point, so that any tiny number equals 0."""


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    logging.disable(logging.CRITICAL)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    import math_verify  # noqa: F401  (pyright: a second or more; the first comparison shall not pay for it)

    _say(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + request["cpu_seconds"]))
        _say(replies, {"same": same(request["answer"], request["gold"]), "worn": _resident_bytes() > WORN_BYTES})


def same(answer: str, gold: str) -> bool:
    """Return whether two answers are equivalent; False if one is not mathematics: only texts can be compared then."""
    from math_verify import verify

    expected, found = _parse(gold), _parse(answer)
    if not verify(expected, found, timeout_seconds=None):
        return False
    return all(_close(e, f) for e, f in zip(expected[:1], found[:1], strict=True))


def _parse(answer: str) -> list[Any]:
    """Return the library's reading, as an expression if it can, and as text."""
    from math_verify import LatexExtractionConfig, parse

    box = f"\\boxed{{{answer}}}"
    return parse(box, extraction_config=[LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=0)


def _close(expected: Any, found: Any) -> bool:
    """Compare two numbers, the expected one tiny, relative to their size. Returns: True for everything else."""
    try:
        size, difference = (abs(complex(value.evalf())) for value in (expected, expected - found))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return True
    return size >= SMALLEST_COMPARED_ABSOLUTELY or size == 0 or difference <= RELATIVE_TOLERANCE * size


def _limit(kind: int, value: int) -> None:
    """Set what may be used from now on; a platform that knows no such limit goes without."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _resident_bytes() -> int:
    """Return the largest resident memory so far. On Linux not `ru_maxrss`: a child takes over that of the process that
    started it, and beside a trainer of several GB every process would seem worn after its first comparison."""
    if sys.platform == "linux":
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _say(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
