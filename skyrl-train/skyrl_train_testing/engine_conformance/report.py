"""Execution of checks, and the report of their results."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.inference_engines.base import Feature
from skyrl_train_testing.engine_conformance.registry import CHECKS, Check, ConformanceError, Outcome, check_refusal
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest


async def run_check(check: Check, subject: EngineUnderTest) -> Outcome:
    """Run one check; the engine is afterwards as before.

    Raises:
        ConformanceError: the engine breaks the rule.
    """
    start = time.monotonic()
    await subject.prepare()
    lacking: list[Feature] = [feature for feature in check.needs if feature in subject.info.unsupported]
    failed, unseen = True, None
    try:
        if lacking:
            await check_refusal(subject, lacking[0])
        else:
            unseen = await check.run(subject)
        failed = False
    except Exception as error:  # whatever an engine raises is a finding
        said = str(error) if isinstance(error, ConformanceError) else f"it raised {type(error).__name__}: {error}"
        raise ConformanceError(f"{check.name}: {said}\n    The rule: {check.rule}") from error
    finally:
        if not check.ends_engine:
            await _clean_up(check, subject, failed)
    seconds = time.monotonic() - start
    if lacking:
        return Outcome(check, "lacks", f"{lacking[0]}: {subject.info.unsupported[lacking[0]]}", seconds)
    return Outcome(check, "passed", unseen or "", seconds)


async def _clean_up(check: Check, subject: EngineUnderTest, failed: bool) -> None:
    try:
        await subject.clean_up(failed=failed)
    except Exception as error:  # an engine may raise anything
        if not failed:  # else the check's own error says more
            raise ConformanceError(f"{check.name}: afterwards {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ConformanceReport:
    """Outcomes of all checks."""

    engine: str
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.result == "failed"]

    def raise_if_broken(self) -> None:
        """Raise ConformanceError with every failure."""
        if self.failures:
            raise ConformanceError("\n".join(outcome.words for outcome in self.failures))

    def __str__(self) -> str:
        count = {result: sum(o.result == result for o in self.outcomes) for result in ("passed", "lacks", "failed")}
        lines = [f"{self.engine}: {count['passed']} passed, {count['lacks']} lacking, {count['failed']} failed"]
        for outcome in self.outcomes:
            lines.append(f"{outcome.result:>7} {outcome.seconds:6.1f} s  {outcome.check.name}")
            if outcome.words:
                lines += [f"{'':18}{line}" for line in outcome.words.splitlines()]
        return "\n".join(lines)


async def check_engine(subject: EngineUnderTest, checks: Sequence[Check] | None = None) -> ConformanceReport:
    """Run every check (those that end the engine included), or the given ones."""
    await subject.prepare()
    outcomes = []
    for check in CHECKS if checks is None else checks:
        start = time.monotonic()
        try:
            outcomes.append(await run_check(check, subject))
        except ConformanceError as error:
            outcomes.append(Outcome(check, "failed", str(error), time.monotonic() - start))
    info = subject.info
    await subject.close()
    return ConformanceReport(f"{info.backend} {info.release}, {info.dtype}", tuple(outcomes))
