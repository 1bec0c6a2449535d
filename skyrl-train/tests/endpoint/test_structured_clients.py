"""Programs that ask for answers in a form, unchanged, against the endpoint: LangChain and OpenAI's agents."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from skyrl_train.endpoint.server import EndpointServer
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

from .conftest import serving

pytest.importorskip("llguidance", reason="the extra constrained is not installed")
pytestmark = pytest.mark.full


COMPACT = {"logit_bias": {"3": -100, "4": -100}}
"""Line breaks and spaces banned, with which a small model fills its context."""


class Person(BaseModel):
    """A person. Without further fields: a random model writes them until its context is full."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=0, le=120)


@pytest.fixture
async def server(tool_engine: NativeInferenceEngine, tool_model: str) -> AsyncIterator[EndpointServer]:
    async with serving(tool_engine, tool_model, sampling_defaults={"temperature": 0.5}) as server:
        yield server


@pytest.mark.filterwarnings("ignore:Parameters .'logit_bias'. should be specified explicitly")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_langchain_structured_output(server, method):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model: Any = langchain.ChatOpenAI(
        model="tiny", base_url=server.url, api_key="any", max_retries=0, model_kwargs=COMPACT
    )
    answer = await model.with_structured_output(Person, method=method).ainvoke("Who?")
    await model.root_async_client.close()
    assert isinstance(answer, Person)


async def test_openai_agents_with_output_type_and_required_tool(server):
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    calls: list[str] = []

    @agents.function_tool
    def lookup(city: Literal["Rome", "Oslo"]) -> str:
        """Look up the weather of a city."""
        calls.append(city)
        return "sunny"

    client = AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0)
    model = agents.OpenAIChatCompletionsModel("tiny", client)
    typed = agents.Agent(
        name="typed", model=model, output_type=Person, model_settings=agents.ModelSettings(extra_body=COMPACT)
    )
    result = await asyncio.wait_for(agents.Runner.run(typed, "Who?"), 120)
    assert isinstance(result.final_output, Person)
    caller = agents.Agent(
        name="caller",
        model=model,
        tools=[lookup],
        tool_use_behavior="stop_on_first_tool",
        model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, extra_body=COMPACT),
    )
    result = await asyncio.wait_for(agents.Runner.run(caller, "Weather?"), 120)
    assert result.final_output == "sunny"
    assert calls in (["Rome"], ["Oslo"])
    await client.close()
