"""A scripted model that thinks, calls tools and tells results, behind a real server; and its turns as text."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from transformers import PreTrainedTokenizerFast

from skyrl_train.endpoint.recorder import RecordedTurn, RequestRecorder, SessionRecord
from skyrl_train.endpoint.server import EndpointServer
from skyrl_train.generators.base import GeneratorOutput, TrajectoryID
from skyrl_train.generators.recorded import build_recorded_trajectory, compute_recorded_metrics
from skyrl_train.inference_engines.base import (
    Completion,
    GenerationRequest,
    OnTokens,
    TokenDelta,
)
from skyrl_train.rollouts.adapter import to_generator_output
from skyrl_train.rollouts.types import RolloutBatch, group_trajectories
from skyrl_train_testing.scripted_engine import PromptScriptEngine
from skyrl_train_testing.tiny_models import build_character_tokenizer

TEMPLATE = (
    "{% if tools %}<start>tools:{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}<tool_call><end>"
    "{% endif %}"
    "{% for m in messages %}<start>{{ m['role'] }}:{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% if thinks %}<think>\n{% endif %}{% endif %}"
)
"""`thinks` opens the thought in the prompt, as templates of reasoning models do."""

CALLS = (
    '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>'  # no spaces: not as the template writes it
    '<tool_call>{"name":"add","arguments":{"b":4,"a":"é"}}</tool_call>'
)
THOUGHT = "Add both.\n\nThen tell."
FIRST = f"\n{THOUGHT}\n</think>\n\nLet me see.{CALLS}"
SECOND = "Easy.</think>It is 5 and 7."
THIRD = "Bye.\n"
ANSWERS = [FIRST, SECOND, THIRD]


def thinking_tokenizer() -> PreTrainedTokenizerFast:
    return build_character_tokenizer(TEMPLATE, added_tokens=["<tool_call>", "</tool_call>", "<think>", "</think>", "é"])


def spoken(prompt: str) -> str:
    """Answer by the number of the user's turns: two calls behind a thought; the result, with a thought; a farewell. A
    thought that the prompt has opened is not opened again."""
    turn = prompt.count("<start>assistant:") - 1
    text = ANSWERS[min(turn, 2)]
    return f"<think>{text}" if "</think>" in text and not prompt.rstrip().endswith("<think>") else text


def always(text: str) -> Callable[[str], str]:
    return lambda prompt: text


@asynccontextmanager
async def scripted(
    script: Callable[[str], str] = spoken, max_model_len: int = 4096, **settings: Any
) -> AsyncIterator[EndpointServer]:
    """A server of the model `tiny`."""
    tokenizer = thinking_tokenizer()
    engine = PromptScriptEngine(tokenizer, script, max_model_len)
    server = EndpointServer(engine, tokenizer, "tiny", **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def break_streams(server: EndpointServer, longest: int) -> None:
    """Let streams fail behind 16 tokens, and at once behind prompts of more than `longest` tokens."""
    engine: Any = server.frontend.engine

    async def stream(request: GenerationRequest, on_tokens: OnTokens) -> Completion:
        if len(request.prompt_token_ids) <= longest:
            ids = (await engine.generate(request)).token_ids
            on_tokens(TokenDelta(ids[:16], None, [0] * 16))
            await asyncio.sleep(0.05)
        raise RuntimeError

    engine.stream = stream


def root_url(server: EndpointServer) -> str:
    """The base URL that Anthropic's clients want."""
    return server.url.removesuffix("/v1")


def recorded_output(turns: list[RecordedTurn], temperature: float | None = None) -> GeneratorOutput:
    """Return what a generator returns for one trajectory with reward 1 and these turns."""
    trajectory = build_recorded_trajectory(SessionRecord(turns=turns), 1.0, TrajectoryID("p", 0), temperature)
    return to_generator_output(RolloutBatch(group_trajectories([trajectory]), compute_recorded_metrics([trajectory])))


def one_row(recorder: RequestRecorder, session: str) -> tuple[list[str], str]:
    """Return the parts that the model wrote in the one training row of a session, and the whole row as text."""
    output = recorded_output(recorder.take(session))
    assert len(output["response_ids"]) == 1, "the conversation is not one row"
    [prompt], [response], [mask] = output["prompt_token_ids"], output["response_ids"], output["loss_masks"]
    tokenizer = thinking_tokenizer()
    parts, last = [], 0
    for token, own in zip(response, mask, strict=True):
        if own and not last:
            parts.append([])
        if own:
            parts[-1].append(token)
        last = own
    return [tokenizer.decode(part) for part in parts], tokenizer.decode(prompt + response)
