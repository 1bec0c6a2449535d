"""Server-sent events of an answer that grows.

A client may see text only when no stop text and no tool call can still
swallow it; tool calls arrive whole, at the end.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from skyrl_train.endpoint.errors import ApiError, error_of_ours
from skyrl_train.endpoint.openai_api.generation import Asker, GeneratedChoice
from skyrl_train.endpoint.openai_api.payloads import END_OF_STREAM, Payload, server_sent
from skyrl_train.endpoint.openai_api.replies import Reply


@dataclass
class _ChoiceState:
    """State of one choice at the client."""

    answer: GeneratedChoice = field(default_factory=GeneratedChoice)
    num_tokens: int = 0
    text: str = ""
    begun: bool = False
    ended: bool = False


async def stream(asker: Asker, reply: Reply, finished: Callable[[list[GeneratedChoice]], None]) -> AsyncGenerator[str]:
    """The events of a request, all choices at the same time.

    An error before the first event is raised, so that it can have a status; a later one is an event.

    Args:
        finished: called with all answers when they are complete, before the last events.
    """
    choices = [_ChoiceState() for prompt in reply.prompts for _ in range(prompt.num_choices)]
    grown: asyncio.Queue[int | Exception] = asyncio.Queue()
    tasks = [asyncio.create_task(_grow(asker, reply, index, choices[index], grown)) for index in range(len(choices))]
    try:
        num_open, begun = len(choices), False
        while num_open:
            event = await grown.get()
            if isinstance(event, Exception):
                if not begun:
                    raise event
                yield server_sent((event if isinstance(event, ApiError) else error_of_ours(event)).body())
                return
            begun = True
            choice = choices[event]
            if choice.ended:  # seen already, with an earlier event
                continue
            choice.ended = choice.answer.stop_reason is not None
            num_open -= choice.ended
            if not num_open:
                finished([choice.answer for choice in choices])
            for payload in _new_parts(reply, event, choice):
                yield server_sent(payload)
        answers = [choice.answer for choice in choices]
        if reply.request.include_usage:
            yield server_sent(reply.envelope.around([], answers, chunk=True) | {"usage": reply.usage(answers)})
        yield END_OF_STREAM
    finally:
        for task in tasks:
            task.cancel()


async def _grow(
    asker: Asker, reply: Reply, index: int, choice: _ChoiceState, grown: "asyncio.Queue[int | Exception]"
) -> None:
    """Generate one choice to its end. The queue tells the reader, who may be slower: several steps are one to it."""
    prompt = reply.prompt_of(index)
    try:
        async with contextlib.aclosing(asker.growing(prompt, index % reply.request.num_choices)) as answers:
            async for answer in answers:
                choice.answer = answer
                grown.put_nowait(index)
    except Exception as error:  # it belongs to the reader
        grown.put_nowait(error)


def _new_parts(reply: Reply, index: int, choice: _ChoiceState) -> list[Payload]:
    """Yield the parts of one choice that the client does not have yet, as chunks."""
    answer = choice.answer
    parts: list[Payload] = []
    if not choice.begun:
        choice.begun = True
        parts += [first] if (first := reply.first_delta(index)) else []
    written = reply.read(answer)
    text = written.content[len(choice.text) :]
    num_new = len(answer.token_ids) - choice.num_tokens
    if text or num_new or written.finish_reason:
        parts.append(reply.delta(index, answer, text, choice.num_tokens, written))
        choice.text += text
        choice.num_tokens += num_new
    usage = {"usage": None} if reply.request.include_usage else {}
    return [reply.envelope.around([part], [answer], chunk=True) | usage for part in parts]
