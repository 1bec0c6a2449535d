"""Invalid requests are refused with the reason, and the engine stays usable."""

from collections.abc import Sequence
from typing import Any

from skyrl_train_testing.engine_conformance.registry import check, check_raises, expect
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest


async def _check_refused(
    subject: EngineUnderTest, prompt: list[int], *, names: Sequence[str] = (), lora: str | None = None, **params: Any
) -> None:
    """ValueError, and the next request is answered as before."""
    good = subject.prompt(5)
    usual = (await subject.generate([good], temperature=0.0, max_tokens=4))["response_ids"]
    shown = {"prompt of": len(prompt), **params, **({"lora_name": lora} if lora else {})}
    asked = subject.generate([good, prompt], lora=lora, **{"max_tokens": 4, **params})
    await check_raises(ValueError, asked, f"a request with {shown}", names=names)
    after = (await subject.generate([good], temperature=0.0, max_tokens=4))["response_ids"]
    expect(after == usual, f"after a refused request the engine answers {after} in place of {usual}")


@check()
async def check_prompt_outside_vocabulary(subject: EngineUnderTest) -> None:
    """A token id outside of the vocabulary raises ValueError, which names it."""
    size = subject.info.vocab_size
    for token in (size, size + 10_000, -1):
        await _check_refused(subject, [*subject.prompt(3), token], names=[str(token)])


@check()
async def check_empty_prompt(subject: EngineUnderTest) -> None:
    """A prompt without a token raises ValueError."""
    await _check_refused(subject, [])


@check()
async def check_prompt_over_context(subject: EngineUnderTest) -> None:
    """A prompt that leaves no room for an answer raises ValueError, which names the context's length."""
    most = subject.info.max_model_len
    for length in (most, most + 7):
        await _check_refused(subject, subject.prompt(length), names=[str(most)])


@check()
async def check_sampling_keywords(subject: EngineUnderTest) -> None:
    """An unknown keyword or a value out of range raises ValueError, which names the keyword."""
    settings: list[tuple[str, Any]] = [
        ("temperatur", 1.0),
        ("best_of", 2),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("min_p", 2.0),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("stop_token_ids", [subject.info.vocab_size]),
    ]
    for name, value in settings:
        await _check_refused(subject, subject.prompt(3), names=[name], **{name: value})


@check()
async def check_unknown_adapter(subject: EngineUnderTest) -> None:
    """A request that names an adapter which is not loaded raises ValueError, which names it."""
    await _check_refused(subject, subject.prompt(3), names=["nobody"], lora="nobody")
