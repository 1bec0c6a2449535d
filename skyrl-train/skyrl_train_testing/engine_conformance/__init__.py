"""Conformance checks of rollout engines, against the same model in transformers.

    subject = EngineUnderTest(engine, model_path)
    report = await check_engine(subject)      # prints nothing, raises nothing
    print(report)                             # a line a check

or, in pytest, with one engine for a module:

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    async def test_conformance(check, subject):
        outcome = await run_check(check, subject)   # ConformanceError if the engine breaks the check's rule
        if outcome.result == "lacks":
            pytest.skip(outcome.words)

`make_tiny_model` writes a model that every engine can run. A check leaves the engine as it found it, its weights
included; only those with `ends_engine` (the last ones) do not. An engine may lack a feature if it says why
(`EngineInfo.unsupported`); then the check is that it refuses.
"""

from skyrl_train_testing.engine_conformance import (  # noqa: F401  (each adds its checks to CHECKS)
    adapters,
    answers,
    bad_input,
    control,
    ending,
    forms,
    stopping,
    transfer_faults,
    weights,
)
from skyrl_train_testing.engine_conformance.model import make_tiny_model
from skyrl_train_testing.engine_conformance.reference import Reference
from skyrl_train_testing.engine_conformance.registry import CHECKS, Check, ConformanceError, Outcome
from skyrl_train_testing.engine_conformance.report import ConformanceReport, check_engine, run_check
from skyrl_train_testing.engine_conformance.subject import TOLERANCES, EngineUnderTest

CHECKS.sort(key=lambda check: check.ends_engine)

__all__ = [
    "CHECKS",
    "TOLERANCES",
    "Check",
    "ConformanceError",
    "ConformanceReport",
    "EngineUnderTest",
    "Outcome",
    "Reference",
    "check_engine",
    "make_tiny_model",
    "run_check",
]
