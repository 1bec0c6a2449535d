"""Conformance checks of backends:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_backend(check):
        await run_check(check, Subject(backend, tokenizer, prompt_ids=tokenizer.encode("...")))

A check raises AssertionError. A check that does not apply to a backend (see `Subject`) returns `NOT_ASKED`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_agent.errors import BackendError, InfraError
from skyrl_agent.integrations.base import decode_response
from skyrl_agent.types import InferBackend, MetaInfo, Tokenizer

__all__ = ["CHECKS", "NOT_ASKED", "Subject", "run_check"]

NOT_ASKED = "not asked"
SECONDS = 60.0
"""Timeout of one check."""
GREEDY = {"temperature": 0.0, "max_tokens": 24}
_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Subject:
    """A backend under test.

    Args:
        prompt_ids: prompt whose greedy completion has at least 8 tokens.
        tells_ids: reports token ids and log-probs; False for text-only servers.
        reads_ids: completions depend on the input ids, as for a model; False for a script.
        checks_requests: rejects invalid requests.
        dead: backend of the same kind whose server has been shut down.
    """

    backend: InferBackend
    tokenizer: Tokenizer
    prompt_ids: Sequence[int]
    tells_ids: bool = True
    reads_ids: bool = True
    checks_requests: bool = True
    dead: InferBackend | None = None

    async def ask(
        self, ids: Sequence[int] | None = None, request_id: str = "conformance", **params: Any
    ) -> tuple[str, MetaInfo]:
        return await self.backend.async_generate_ids(
            input_ids=list(self.prompt_ids if ids is None else ids),
            sampling_params=GREEDY | params,
            request_id=request_id,
        )


Check = Callable[[Subject], Awaitable[str | None]]


async def run_check(check: Check, subject: Subject) -> str | None:
    """Raises AssertionError, also where it takes longer than `SECONDS`."""
    try:
        async with asyncio.timeout(SECONDS):
            return await check(subject)
    except TimeoutError:
        raise AssertionError(f"{check.__name__} did not end within {SECONDS:g} s") from None


async def the_text_is_that_of_the_ids(subject: Subject) -> str | None:
    """Check that text and token ids of a reply agree."""
    text, meta = await subject.ask()
    assert isinstance(text, str) and text, f"the completion is {text!r}"
    if not subject.tells_ids:
        assert meta["output_tokens"] is None and meta["logprobs"] is None, "what is not known must be None"
        return NOT_ASKED
    ids = meta["output_tokens"]
    assert ids and all(type(token) is int for token in ids), f"ids must be integers; got {ids}"
    assert text == decode_response(subject.tokenizer, ids, meta["finish_reason"])
    return None


async def every_token_has_a_log_prob(subject: Subject) -> str | None:
    """Check that each token has a finite log-prob."""
    _, meta = await subject.ask(temperature=1.0)
    if not subject.tells_ids:
        return NOT_ASKED
    ids, logprobs = meta["output_tokens"], meta["logprobs"]
    assert ids is not None and logprobs is not None, "ids come with log-probs"
    assert len(logprobs) == len(ids), f"{len(logprobs)} log-probs for {len(ids)} ids"
    assert all(math.isfinite(value) and value <= 1e-4 for value in logprobs), f"no log-probs: {logprobs}"
    assert any(value != 0 for value in logprobs), "all log-probs are 0: they are made up"
    return None


async def ids_are_read_as_they_are(subject: Subject) -> str | None:
    """Check that the model continues its own first tokens as before, with the same log-probs."""
    if not (subject.tells_ids and subject.reads_ids):
        return NOT_ASKED
    _, whole = await subject.ask()
    ids, logprobs = whole["output_tokens"], whole["logprobs"]
    assert ids is not None and logprobs is not None and len(ids) >= 8, f"the prompt of the test is too weak: {ids}"
    _, rest = await subject.ask([*subject.prompt_ids, *ids[:4]], max_tokens=len(ids) - 4)
    assert rest["output_tokens"] == ids[4:]
    assert rest["logprobs"] is not None
    for position, (value, expected) in enumerate(zip(rest["logprobs"], logprobs[4:], strict=True)):
        assert abs(value - expected) < _TOLERANCE, f"log-prob {position}: {value} after, {expected} before"
    return None


async def the_budget_is_kept(subject: Subject) -> str | None:
    """Check `max_tokens` and its finish reason."""
    _, meta = await subject.ask(max_tokens=3)
    assert meta["finish_reason"] in ("stop", "length"), meta["finish_reason"]
    if not subject.tells_ids:
        return NOT_ASKED
    ids = meta["output_tokens"]
    assert ids is not None and len(ids) <= 3, f"{len(ids or [])} tokens of at most 3"
    assert meta["finish_reason"] == "length", "an answer of more tokens was cut off, so its finish reason is length"
    return None


async def a_stop_string_ends_the_answer_and_stays_in_it(subject: Subject) -> str | None:
    """Check stop strings."""
    text, _ = await subject.ask()
    stop = text[3:5]
    assert len(stop) == 2, f"the prompt of the test is too weak: {text!r}"
    end = text.index(stop) + len(stop)
    found, meta = await subject.ask(stop=[stop])
    assert meta["finish_reason"] == "stop", f"finish reason {meta['finish_reason']} at a stop string"
    if not subject.tells_ids:
        assert text[:end].startswith(found)
        return NOT_ASKED
    assert found.startswith(text[:end]), f"{found!r} does not end with the stop string {stop!r} of {text!r}"
    assert len(found) < len(text), f"the completion continued after the stop string {stop!r}: {found!r}"
    return None


async def requests_at_the_same_time_do_not_mix(subject: Subject) -> str | None:
    """Check that concurrent requests do not affect each other."""
    if not subject.reads_ids:
        return NOT_ASKED
    prompts = [list(subject.prompt_ids[start:]) for start in range(4)]
    alone = [(await subject.ask(prompt))[0] for prompt in prompts]
    together = await asyncio.gather(*(subject.ask(prompt, f"{i}") for i, prompt in enumerate(prompts)))
    assert [text for text, _ in together] == alone
    return None


async def a_seed_gives_the_same_answer_again(subject: Subject) -> str | None:
    """Check that a seed reproduces a completion."""
    if not subject.reads_ids:
        return NOT_ASKED
    first, again, *others = [(await subject.ask(temperature=1.0, seed=seed))[0] for seed in (1, 1, 2, 3, 4)]
    assert first == again, "the same seed gave two answers"
    assert any(other != first for other in others), "other seeds gave the same answer"
    return None


async def an_impossible_request_is_refused(subject: Subject) -> str | None:
    """Check that a temperature of -1 is a BackendError."""
    if not subject.checks_requests:
        return NOT_ASKED
    try:
        answer = await subject.ask(temperature=-1.0)
    except BackendError:
        return None
    raise AssertionError(f"a temperature of -1 was accepted: {answer}")


async def a_cancelled_request_leaves_the_backend_usable(subject: Subject) -> str | None:
    """Check that a request after a cancelled one works."""
    before = await subject.ask()
    waiting = asyncio.create_task(subject.ask(max_tokens=100))
    await asyncio.sleep(0)
    waiting.cancel()
    done, _ = await asyncio.wait({waiting}, timeout=10)
    assert done, "a cancelled request did not end within 10 s"
    assert waiting.cancelled(), "a cancellation was swallowed"
    assert (await subject.ask())[0] == before[0]
    return None


async def a_dead_server_is_an_infrastructure_failure(subject: Subject) -> str | None:
    """Check that a dead server is an InfraError."""
    if subject.dead is None:
        return NOT_ASKED
    try:
        await subject.dead.async_generate_ids(
            input_ids=list(subject.prompt_ids), sampling_params=GREEDY, request_id="dead"
        )
    except InfraError:
        return None
    raise AssertionError("a server that was shut down replied")


CHECKS: list[Check] = [
    the_text_is_that_of_the_ids,
    every_token_has_a_log_prob,
    ids_are_read_as_they_are,
    the_budget_is_kept,
    a_stop_string_ends_the_answer_and_stays_in_it,
    requests_at_the_same_time_do_not_mix,
    a_seed_gives_the_same_answer_again,
    an_impossible_request_is_refused,
    a_cancelled_request_leaves_the_backend_usable,
    a_dead_server_is_an_infrastructure_failure,
]
