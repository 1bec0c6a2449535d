"""Invalid requests are refused with the reason, and the engine stays usable."""

from collections.abc import Sequence
from typing import Any

from skyrl_train_testing.engine_conformance.registry import check, expect, expect_raises
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest


async def _expect_refused(
    subject: EngineUnderTest, prompt: list[int], *, names: Sequence[str] = (), lora: str | None = None, **params: Any
) -> None:
    """ValueError, and the next request is answered as before."""
    good = subject.prompt(5)
    usual = (await subject.generate([good], temperature=0.0, max_tokens=4))["response_ids"]
    shown = {"prompt of": len(prompt), **params, **({"lora_name": lora} if lora else {})}
    asked = subject.generate([good, prompt], lora=lora, **{"max_tokens": 4, **params})
    await expect_raises(ValueError, asked, f"a request with {shown}", names=names)
    after = (await subject.generate([good], temperature=0.0, max_tokens=4))["response_ids"]
    expect(after == usual, f"after a refused request the engine answers {after} in place of {usual}")


@check()
async def a_prompt_outside_the_vocabulary_is_refused(subject: EngineUnderTest) -> None:
    """A token id outside of the vocabulary raises ValueError, which names it."""
    size = subject.info.vocab_size
    for token in (size, size + 10_000, -1):
        await _expect_refused(subject, [*subject.prompt(3), token], names=[str(token)])


@check()
async def an_empty_prompt_is_refused(subject: EngineUnderTest) -> None:
    """A prompt without a token raises ValueError."""
    await _expect_refused(subject, [])


@check()
async def a_prompt_over_the_context_is_refused(subject: EngineUnderTest) -> None:
    """A prompt that leaves no room for an answer raises ValueError, which names the context's length."""
    most = subject.info.max_model_len
    for length in (most, most + 7):
        await _expect_refused(subject, subject.prompt(length), names=[str(most)])


@check()
async def sampling_keywords_are_checked(subject: EngineUnderTest) -> None:
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
        await _expect_refused(subject, subject.prompt(3), names=[name], **{name: value})


@check()
async def an_unknown_adapter_is_refused(subject: EngineUnderTest) -> None:
    """A request that names an adapter which is not loaded raises ValueError, which names it."""
    await _expect_refused(subject, subject.prompt(3), names=["nobody"], lora="nobody")
