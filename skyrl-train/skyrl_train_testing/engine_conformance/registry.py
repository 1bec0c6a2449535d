"""Registration of checks, their failures, and the outcome of checks that an engine does not support."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from skyrl_train.errors import SkyRLError, UnsupportedByEngine
from skyrl_train.inference_engines.base import Feature, InferenceEngineInput
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightSyncInitInfo

if TYPE_CHECKING:
    from skyrl_train_testing.engine_conformance.subject import EngineUnderTest


class ConformanceError(SkyRLError, AssertionError):
    """An engine does not do what `InferenceEngineInterface` says. The text has the check's name, its rule and the
    numbers."""


@dataclass(frozen=True)
class Check:
    """A rule that every engine keeps.

    Attributes:
        name: the claim.
        rule: the same in a sentence.
        run: raises ConformanceError where it is broken; leaves the engine as it was. May return what it did not get to
            see.
        needs: features without which the engine has to refuse instead.
        ends_engine: the engine cannot be used afterwards.
    """

    name: str
    rule: str
    run: "Run"
    needs: tuple[Feature, ...] = ()
    ends_engine: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Outcome:
    """Outcome of one check."""

    check: Check
    result: Literal["passed", "lacks", "failed"]
    words: str = ""
    """`lacks`: the engine's reason. `failed`: what is wrong. `passed`: what could not be seen, if anything."""
    seconds: float = 0.0


Run = Callable[["EngineUnderTest"], Awaitable[str | None]]

CHECKS: list[Check] = []
"""Every check, in the order of the files that hold them."""


def check(*needs: Feature, ends_engine: bool = False) -> Callable[[Run], Run]:
    """Register a coroutine function as a check. Its name is the check's, its docstring the rule."""

    def register(run: Run) -> Run:
        assert run.__doc__, f"{run.__name__} needs a docstring: its rule"  # type: ignore[attr-defined]
        rule = " ".join(run.__doc__.split())
        CHECKS.append(Check(run.__name__, rule, run, needs, ends_engine))  # type: ignore[attr-defined]
        return run

    return register


def expect(holds: Any, text: str) -> None:
    """Raise ConformanceError with `text` unless `holds`."""
    if not holds:
        raise ConformanceError(text)


def check_close(
    what: str,
    got: Sequence[float],
    expected: torch.Tensor,
    tolerance: float,
    other_meanings: dict[str, torch.Tensor] | None = None,
) -> None:
    """Check log-probs.

    Args:
        got: [T]
        expected: [T]
        other_meanings: description -> [T] numbers of a typical mistake; named if they match.
    """
    expect(len(got) == len(expected), f"{what}: {len(got)} log-probs for {len(expected)} tokens")
    if not len(got):
        return
    found = torch.tensor(got, dtype=torch.float64)
    off = (found - expected.double()).abs().nan_to_num(nan=torch.inf)
    worst = int(off.argmax())
    if off[worst] <= tolerance:
        return
    hints = [
        words
        for words, numbers in (other_meanings or {}).items()
        if float((found - numbers.double()).abs().nan_to_num(nan=torch.inf).max()) <= tolerance
    ]
    hint = f"; they are {' or '.join(hints)}" if hints else ""
    raise ConformanceError(
        f"{what}: the log-prob of token {worst} of {len(got)} should be {float(expected[worst]):.6f}, got "
        f"{float(found[worst]):.6f} (tolerance {tolerance:g}; {int((off > tolerance).sum())} differ){hint}"
    )


async def check_raises(
    kind: type[BaseException], call: Awaitable[Any], what: str, *, names: Sequence[str] = ()
) -> BaseException:
    """`call` raises `kind` with a text that holds one of `names`, if there are any; returns the error."""
    try:
        answer = await call
    except kind as error:
        said = any(name in str(error) for name in names) or not names
        expect(said, f"{what}: the error must name {' or '.join(names)}; it says: {str(error)!r}")
        return error
    except ConformanceError:
        raise
    except Exception as error:  # any other error of an engine breaks the rule
        raise ConformanceError(f"{what} must raise {kind.__name__}; raised {type(error).__name__}: {error}") from error
    raise ConformanceError(f"{what} must raise {kind.__name__}; got an answer: {str(answer)[:200]}")


async def check_refusal(subject: "EngineUnderTest", feature: Feature) -> None:
    """An engine that lacks a feature raises when it is requested."""
    engine = subject.engine

    def generate(**params: Any) -> Awaitable[Any]:
        prompts = [subject.prompt(4)]
        return engine.generate_batch(
            InferenceEngineInput(prompt_token_ids=prompts, sampling_params={"max_tokens": 2, **params})
        )

    asking: dict[Feature, Callable[[], Awaitable[Any]]] = {
        "seed": lambda: generate(seed=1),
        "stop_strings": lambda: generate(stop=["a"]),
        "prompt_log_probs": lambda: generate(prompt_logprobs=0),
        "prompt_top_log_probs": lambda: generate(prompt_logprobs=3),
        "top_log_probs": lambda: generate(logprobs=3),
        "penalties": lambda: generate(presence_penalty=1.0),
        "logit_bias": lambda: generate(logit_bias={3: 1.0}),
        "json_schema": lambda: generate(constraint={"json_schema": {"type": "integer"}}),
        "grammar": lambda: generate(constraint={"lark": "start: /a+/"}),
        "answer_tokens": lambda: generate(presence_penalty=1.0, num_answer_tokens=1),
        "weight_update": lambda: engine.init_weight_update_communicator(WeightSyncInitInfo(transport="shared_memory")),
        "broadcast": lambda: engine.init_weight_update_communicator(WeightSyncInitInfo(transport="broadcast")),
        "lora": lambda: engine.load_lora(LoraLoadRequest(name="none", path=str(subject.directory))),
        "pause_keep": lambda: engine.pause_generation("keep"),
        "pause_wait": lambda: engine.pause_generation("wait"),
        "sleep": lambda: engine.sleep(1),
    }
    await check_raises(UnsupportedByEngine, subject.in_time(asking[feature]()), f"asking for {feature}")
