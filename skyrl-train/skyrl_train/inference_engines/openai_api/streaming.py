"""Server-sent events of an answer that grows.

Engines answer whole requests, so a streamed answer is asked for in pieces (`generation.py`): the first events arrive
after a few tokens, later ones in larger steps. A client may see text only when no stop text and no tool call can still
swallow it; tool calls arrive whole, at the end.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.inference_engines.openai_api.errors import ApiError, error_of_ours
from skyrl_train.inference_engines.openai_api.generation import Answer, Asker
from skyrl_train.inference_engines.openai_api.payloads import END_OF_STREAM, server_sent
from skyrl_train.inference_engines.openai_api.replies import Reply


@dataclass
class _Choice:
    """What a client has of one choice."""

    answer: Answer = field(default_factory=Answer)
    num_tokens: int = 0
    text: str = ""
    begun: bool = False
    ended: bool = False


async def stream(asker: Asker, reply: Reply, finished: Callable[[list[Answer]], None]) -> AsyncGenerator[str]:
    """The events of a request, all choices at the same time.

    An error before the first event is raised, so that it can have a status; a later one is an event.

    Args:
        finished: called with all answers when they are complete, before the last events.
    """
    choices = [_Choice() for prompt in reply.prompts for _ in range(prompt.num_choices)]
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
    asker: Asker, reply: Reply, index: int, choice: _Choice, grown: "asyncio.Queue[int | Exception]"
) -> None:
    """Asks for one choice to its end. The queue tells the reader, who may be slower: it then sees several pieces as
    one."""
    prompt = reply.prompt_of(index)
    try:
        async for answer in asker.pieces(prompt, index % reply.request.num_choices, reply.decode):
            choice.answer = answer
            grown.put_nowait(index)
    except Exception as error:  # it belongs to the reader
        grown.put_nowait(error)


def _new_parts(reply: Reply, index: int, choice: _Choice) -> list[dict[str, Any]]:
    """What the client does not have yet of one choice, as chunks."""
    answer = choice.answer
    parts: list[dict[str, Any]] = []
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
