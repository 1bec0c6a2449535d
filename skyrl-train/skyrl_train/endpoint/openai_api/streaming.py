"""Server-sent events of a streamed response.

Text is sent only when no stop text or tool call can still include it; tool calls are sent complete, at the end.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from skyrl_train.endpoint.errors import ApiError, build_internal_error
from skyrl_train.endpoint.openai_api.generation import EngineRequester, GeneratedChoice
from skyrl_train.endpoint.openai_api.payloads import END_OF_STREAM, Payload, format_server_sent_event
from skyrl_train.endpoint.openai_api.replies import Reply


@dataclass
class _ChoiceState:
    """State of one choice as sent to the client."""

    answer: GeneratedChoice = field(default_factory=GeneratedChoice)
    num_tokens: int = 0
    text: str = ""
    begun: bool = False
    ended: bool = False


async def stream_events(
    asker: EngineRequester, reply: Reply, finished: Callable[[list[GeneratedChoice]], None]
) -> AsyncGenerator[str]:
    """Yield the events of a request, with all choices concurrently.

    An error before the first event is raised, so that it can set the HTTP status; a later one becomes an event.

    Args:
        finished: called with all choices when they are complete, before the last events.
    """
    choices = [_ChoiceState() for prompt in reply.prompts for _ in range(prompt.num_choices)]
    grown: asyncio.Queue[int | Exception] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_run_choice(asker, reply, index, choices[index], grown)) for index in range(len(choices))
    ]
    try:
        num_open, begun = len(choices), False
        while num_open:
            event = await grown.get()
            if isinstance(event, Exception):
                if not begun:
                    raise event
                yield format_server_sent_event(
                    (event if isinstance(event, ApiError) else build_internal_error(event)).body()
                )
                return
            begun = True
            choice = choices[event]
            if choice.ended:  # already sent with an earlier event
                continue
            choice.ended = choice.answer.stop_reason is not None
            num_open -= choice.ended
            if not num_open:
                finished([choice.answer for choice in choices])
            for payload in _iter_new_chunks(reply, event, choice):
                yield format_server_sent_event(payload)
        answers = [choice.answer for choice in choices]
        if reply.request.include_usage:
            yield format_server_sent_event(
                reply.envelope.build([], answers, chunk=True) | {"usage": reply.build_usage(answers)}
            )
        yield END_OF_STREAM
    finally:
        for task in tasks:
            task.cancel()


async def _run_choice(
    asker: EngineRequester, reply: Reply, index: int, choice: _ChoiceState, grown: "asyncio.Queue[int | Exception]"
) -> None:
    """Generate one choice completely. The queue notifies the reader; a slower reader merges several steps."""
    prompt = reply.get_prompt(index)
    try:
        async with contextlib.aclosing(asker.generate_growing(prompt, index % reply.request.num_choices)) as answers:
            async for answer in answers:
                choice.answer = answer
                grown.put_nowait(index)
    except Exception as error:  # raised in the reader
        grown.put_nowait(error)


def _iter_new_chunks(reply: Reply, index: int, choice: _ChoiceState) -> list[Payload]:
    """Yield the unsent parts of one choice as chunks."""
    answer = choice.answer
    parts: list[Payload] = []
    if not choice.begun:
        choice.begun = True
        parts += [first] if (first := reply.build_first_delta(index)) else []
    written = reply.read(answer)
    text = written.content[len(choice.text) :]
    num_new = len(answer.token_ids) - choice.num_tokens
    if text or num_new or written.finish_reason:
        parts.append(reply.delta(index, answer, text, choice.num_tokens, written))
        choice.text += text
        choice.num_tokens += num_new
    usage = {"usage": None} if reply.request.include_usage else {}
    return [reply.envelope.build([part], [answer], chunk=True) | usage for part in parts]
