"""A tiny model that has learned one conversation with a tool by heart, and real servers in front of real engines."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from skyrl_train.endpoint.openai_api import generation
from skyrl_train.endpoint.server import EndpointServer
from skyrl_train.inference_engines.native import engine as native_engine
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.loading import load_tokenizer
from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

TOOL_TEMPLATE = (
    "{% if tools %}<start>system:tools"
    "{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}. Write <tool_call> to call.<end>{% endif %}"
    "{% for m in messages %}<start>{{ m['role'] }}:"
    "{% if m['role'] == 'assistant' %}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
QUESTION = {"role": "user", "content": "2+3?"}
CALL = '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>'  # no spaces: not as the template writes it
ANSWER = "It is 5."
THANKS = {"role": "user", "content": "And then?"}
FAREWELL = "Bye."


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of two layers that calls `add` when asked for 2+3, tells the result and says goodbye. Its tokenizer has
    one token a character, and a few special ones."""
    folder = tmp_path_factory.mktemp("models") / "tool"
    tokenizer = build_character_tokenizer(TOOL_TEMPLATE, added_tokens=["<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(folder)
    model = build_tiny_qwen3(hidden_size=64, vocab_size=len(tokenizer), max_position_embeddings=512)
    ids, written = _conversation(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(120):
        logits = model(input_ids=ids[None, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[written[1:]], ids[1:][written[1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05, f"the model has not learned its conversation: loss {loss:.3f}"
    model.save_pretrained(folder)
    return str(folder)


def _conversation(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The conversation that the model learns, and which of its tokens are the model's."""
    head = tokenizer.apply_chat_template([QUESTION], tools=[ADD], tokenize=False, add_generation_prompt=True)
    parts = [
        (head, False),
        (f"{CALL}<end>", True),
        ("<start>tool:5<end><start>assistant:", False),
        (f"{ANSWER}<end>", True),
        (f"<start>user:{THANKS['content']}<end><start>assistant:", False),
        (f"{FAREWELL}<end>", True),
    ]
    ids: list[int] = []
    written: list[bool] = []
    for text, is_written in parts:
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += encoded
        written += [is_written] * len(encoded)
    return torch.tensor(ids), torch.tensor(written)


@pytest.fixture(autouse=True)
def _streams_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come as they are generated, or short answers would be whole at once."""
    monkeypatch.setattr(native_engine, "HAND_OUT_SECONDS", 0.0)
    monkeypatch.setattr(generation, "GROWTH_SECONDS", 0.0)


def engine_of(model: str, **settings: Any) -> NativeInferenceEngine:
    return NativeInferenceEngine(model, device="cpu", dtype="float32", max_num_seqs=32, **settings)


@pytest.fixture(scope="session")
def tool_engine(tool_model: str):
    engine = engine_of(tool_model)
    yield engine
    asyncio.run(engine.teardown())


@pytest.fixture(scope="session")
def chat_engine(chat_model: str):
    """Random weights, a context of 256 tokens."""
    engine = engine_of(chat_model)
    yield engine
    asyncio.run(engine.teardown())


@asynccontextmanager
async def serving(engine: NativeInferenceEngine, model: str, **settings: Any) -> AsyncIterator[EndpointServer]:
    """An endpoint on a free port; the model's name is `tiny`."""
    server = EndpointServer(engine, load_tokenizer(model, False), "tiny", **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def client_of(server: EndpointServer, **settings: Any) -> AsyncIterator[AsyncOpenAI]:
    """The real client, without its retries."""
    async with AsyncOpenAI(**({"base_url": server.url, "api_key": "any", "max_retries": 0} | settings)) as client:
        yield client


@pytest.fixture
async def chat_client(chat_engine: NativeInferenceEngine, chat_model: str) -> AsyncIterator[AsyncOpenAI]:
    async with serving(chat_engine, chat_model) as server, client_of(server) as client:
        yield client


async def in_thread(server: EndpointServer, call: Callable[[OpenAI], Any]) -> Any:
    """Return the result of `call` for the synchronous client, run in a thread."""

    def work() -> Any:
        with OpenAI(base_url=server.url, api_key="any", max_retries=0) as client:
            return call(client)

    return await asyncio.to_thread(work)


async def run_agent(client: AsyncOpenAI, session: str) -> list[dict[str, Any]]:
    """An agent that knows only OpenAI's API: asks, calls the tool it is told to, gives the result, says thanks."""
    messages: list[dict[str, Any]] = [QUESTION]
    for _ in range(3):
        answer = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[ADD],
            temperature=0,
            max_tokens=80,
            extra_headers={"X-Session-ID": session},
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            if messages[-1]["content"] == FAREWELL:
                break
            messages.append(THANKS)
            continue
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            result = str(numbers["a"] + numbers["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages
