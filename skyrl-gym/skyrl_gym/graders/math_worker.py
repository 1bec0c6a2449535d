r"""The process in which math-verify compares answers: `python -m skyrl_gym.graders.math_worker`.

Writes `{"ready": true}`, then replies to each line `{"answer": str, "gold": str, "cpu_seconds": float}` on standard
input by one line `{"same": bool, "worn": bool}`, and ends with its input. Algebra on an answer may need any time and
memory: the kernel ends the process (SIGXCPU) when a comparison exceeds its CPU seconds, also inside one long operation
and after its caller has stopped waiting.
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
"""math-verify compares decimals to six digits after the point, so that any tiny number equals 0."""

EXACT_DIGITS = 400
EXACT_TOLERANCE = 1e-100
"""math-verify compares irrational numbers to 15 digits after the point. Here their relative difference is evaluated
with up to `EXACT_DIGITS` digits; that of equal numbers vanishes in all of them."""


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    logging.disable(logging.CRITICAL)
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_FSIZE, 0)
    _set_limit(resource.RLIMIT_AS, MEMORY_BYTES)
    import math_verify  # noqa: F401  (pyright: a second or more; the first comparison shall not pay for it)

    _write_message(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _set_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + request["cpu_seconds"]))
        _write_message(
            replies, {"same": same(request["answer"], request["gold"]), "worn": _get_resident_bytes() > WORN_BYTES}
        )


def same(answer: str, gold: str) -> bool:
    """Return whether two answers are equivalent; False if one is not mathematics: only texts can be compared then."""
    from math_verify import verify

    expected, found = _parse(gold), _parse(answer)
    if not verify(expected, found, timeout_seconds=None):
        return False
    return all(_is_close(e, f) for e, f in zip(expected[:1], found[:1], strict=True))


def _parse(answer: str) -> list[Any]:
    """Return the library's reading, as an expression if it can, and as text."""
    from math_verify import LatexExtractionConfig, parse

    box = f"\\boxed{{{answer}}}"
    return parse(box, extraction_config=[LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=0)


def _is_close(expected: Any, found: Any) -> bool:
    """Compare again what the library takes for equal: exact numbers exactly, tiny decimals relative to their size,
    lists element by element. Returns: True for everything else."""
    import sympy

    if expected == found:  # evaluating towers of powers would take the worker's time
        return True
    if isinstance(expected, sympy.MatrixBase) and isinstance(found, sympy.MatrixBase):
        return all(map(_is_close, expected.flat(), found.flat()))
    if isinstance(expected, sympy.FiniteSet) and isinstance(found, sympy.FiniteSet):
        return all(any(_is_close(e, f) for f in found.args) for e in expected.args)
    if isinstance(expected, sympy.Tuple) and isinstance(found, sympy.Tuple):
        return all(map(_is_close, expected.args, found.args))
    if isinstance(expected, sympy.core.relational.Relational) and expected.func == found.func:
        sides: tuple[Any, ...] = (expected.lhs, expected.rhs, found.lhs, found.rhs)
        if all(isinstance(side, sympy.Expr) for side in sides):  # not a set, as in `x = [1, 2]`
            expected, found = sides[0] - sides[1], sides[2] - sides[3]
    if not (isinstance(expected, sympy.Expr) and isinstance(found, sympy.Expr)):
        return True
    try:
        return _are_close_numbers(expected.doit(), found.doit())
    except (AttributeError, TypeError, ValueError, OverflowError, ZeroDivisionError):
        return True


def _are_close_numbers(expected: Any, found: Any) -> bool:
    """Compare two expressions. Their sizes stay numbers of sympy, whose exponents have no bounds: a float of 1e-400 is
    0."""
    import sympy

    difference = expected - found
    is_exact = not (expected.has(sympy.Float) or found.has(sympy.Float))
    if expected.free_symbols or found.free_symbols:
        difference = sympy.expand(difference)
        return bool(difference == 0 or not (is_exact and difference.is_Rational))
    if is_exact and expected.is_Rational and found.is_Rational:
        return bool(expected == found)
    size = abs(expected).evalf()
    if size == 0:
        return bool(abs(difference).evalf() == 0)
    if is_exact:
        return bool(abs(difference / expected).evalf(15, maxn=EXACT_DIGITS) <= EXACT_TOLERANCE)
    return bool(size >= SMALLEST_COMPARED_ABSOLUTELY or abs(difference).evalf() <= RELATIVE_TOLERANCE * size)


def _set_limit(kind: int, value: int) -> None:
    """Set what may be used from now on; a platform without such a limit does not enforce it."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _get_resident_bytes() -> int:
    """Return the peak resident memory. Not `ru_maxrss` on Linux: a child inherits it from the parent process, so with a
    trainer of several GB every process would seem worn after its first comparison."""
    if sys.platform == "linux":
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _write_message(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
