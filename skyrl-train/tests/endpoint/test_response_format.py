"""Chat answers in a form: JSON of a schema, and tool calls that must or must not be made."""

import json
from typing import Any, Literal

import jsonschema
import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from skyrl_gym.chat.tool_calls import split_tool_calls
from skyrl_train.endpoint.errors import ApiError
from skyrl_train.endpoint.openai_api.prompts import EndpointTemplate
from skyrl_train.endpoint.openai_api.response_format import build_constraint, get_thought_mode, parse_output_format
from skyrl_train.endpoint.openai_api.schema import ChatRequest, parse_fields
from skyrl_train.inference_engines.native.constrained import ConstraintCompiler
from skyrl_train_testing.tiny_models import build_character_tokenizer

from .conftest import ADD, QUESTION, client_of, serving

pytest.importorskip("llguidance", reason="the extra constrained is not installed")

HELLO = [{"role": "user", "content": "Hello"}]
SUBTRACT = {
    "type": "function",
    "function": {
        "name": "subtract",
        "parameters": {
            "type": "object",
            "$defs": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
            "properties": {"a": {"$ref": "#/$defs/number"}, "sign": {"type": "string", "enum": ["+", "-"]}},
            "required": ["a", "sign"],
            "additionalProperties": False,
        },
    },
}
CLOSED_ADD: Any = {
    "type": "function",
    "function": ADD["function"] | {"parameters": ADD["function"]["parameters"] | {"additionalProperties": False}},
}
"""Without further arguments, which a random model names twice: such calls are refused by the parser."""


class Tag(BaseModel):
    name: Literal["red", "blue"]


class Item(BaseModel):
    """Schema with a definition of its own, which schemas of pydantic refer to."""

    count: int = Field(ge=0, le=99)
    tags: list[Tag] = Field(max_length=2)
    is_new: bool


# Grammars alone


def matcher_of(values: dict[str, Any], template: str, prompt: str = "assistant:", added: tuple[str, ...] = ()) -> Any:
    """The matcher of answers to a request with these fields, and its tokenizer."""
    tokenizer = build_character_tokenizer(template, added_tokens=list(added))
    endpoint = EndpointTemplate(tokenizer)
    form = parse_output_format(parse_fields(ChatRequest, {"model": "tiny", "messages": HELLO} | values))
    syntax = "llama3_json" if "parameters" in template else "hermes"
    constraint = build_constraint(form, get_thought_mode(endpoint, prompt), endpoint, syntax)
    assert constraint is not None
    return ConstraintCompiler(tokenizer, len(tokenizer), [1])._build_matcher(constraint, []), tokenizer


def accepts(matcher_and_tokenizer: Any, text: str) -> bool:
    """Whether the answer may be this text and end there."""
    matcher, tokenizer = matcher_and_tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    drafts = matcher.compute_allowed(np.array([*ids, 1]))
    return all(drafts[place, token] for place, token in enumerate([*ids, 1]))


HERMES, LLAMA, CODER = "<tool_call>", '"parameters"', "<tool_call><function="
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
OTHER = '<tool_call>{"name":"subtract","arguments":{"a":3,"sign":"-"}}</tool_call>'
TOOLS = {"tools": [ADD, SUBTRACT]}
NAMED = {"type": "function", "function": {"name": "subtract"}}


@pytest.mark.parametrize(
    "values, template, accepted, refused",
    [
        (
            {"tool_choice": "required"},
            HERMES,
            [ONE, OTHER, f"{ONE}\n{OTHER}"],
            ["", "No.", f"I call {ONE}", ONE[:-3], ONE.replace("add", "sub"), OTHER.replace("-", "*"), "{}"],
        ),
        ({"tool_choice": "required", "parallel_tool_calls": False}, HERMES, [ONE], [f"{ONE}\n{OTHER}", "No."]),
        ({"tool_choice": NAMED}, HERMES, [OTHER], [ONE, OTHER.replace("3", "30")]),
        (
            {"parallel_tool_calls": False},
            HERMES,
            ["", "No <tool call>", ONE, f"I call {ONE}\n", "<tool_call"],
            [f"{ONE}\n{OTHER}", f"{ONE} and so on", "<tool_call>", OTHER.replace("3", "30")],
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            HERMES,
            [OTHER],
            [ONE],
        ),
        (
            {"tool_choice": "required"},
            LLAMA,
            ['{"name": "add", "parameters": {"a": 1}}', '{"name":"add","parameters":{}};{"name":"add","parameters":{}}'],  # noqa: E501
            ["Yes", '{"name": "add"}', '{"name": "add", "arguments": {}}'],
        ),
        (
            {"parallel_tool_calls": False},
            LLAMA,
            ["", "Yes, {}", '{"name": "add", "parameters": {"a": 1}}'],
            ['{"name":"add","parameters":{}};{"name":"add","parameters":{}}', '{"a": 1}'],
        ),
        (
            {"tool_choice": NAMED},
            CODER,
            ["<tool_call>\n<function=subtract>\n<parameter=a>\n3\n</parameter>\n<parameter=sign>\n-\n</parameter>\n"
             "</function>\n</tool_call>"],
            ["<tool_call><function=subtract><parameter=a>x</parameter></function></tool_call>", OTHER],
        ),
        (
            {"tool_choice": "auto", "response_format": {"type": "json_object"}},
            HERMES,
            [ONE, '{"a": [1, 2]}', f"{ONE}{OTHER}"],
            ["Yes", "[1]", f'{{"a": 1}}{ONE}'],
        ),
        ({"tool_choice": "none", "response_format": {"type": "json_object"}}, HERMES, ["{}"], [ONE, "[]"]),
    ],
    ids=["required", "one", "named", "at most one", "allowed", "llama", "llama at most one", "coder", "schema", "none"],
)  # fmt: skip
@pytest.mark.parametrize("added", [(), ("<tool_call>", "</tool_call>")], ids=["text", "tokens"])
def test_grammar_of_tool_calls(values, template, accepted, refused, added):
    """Tags may be tokens of their own or text; accepted answers hold the calls that our parser reads."""
    matcher = matcher_of(TOOLS | values, template, added=added)
    assert [text for text in accepted if not accepts(matcher, text)] == []
    assert [text for text in refused if accepts(matcher, text)] == []
    for text in accepted:
        _, calls = split_tool_calls(text, "llama3_json" if template == LLAMA else "hermes")
        assert len(calls) == text.count('"name"') + text.count("<function=") or text == '{"a": [1, 2]}' or not calls


@pytest.mark.parametrize("schema", [{"properties": ["a"]}, {"properties": {"a": {}}, "required": True}])
def test_tagged_arguments_require_object_schema(schema):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(ApiError, match="tool_choice"):
        matcher_of({"tools": tools, "tool_choice": "required"}, CODER)


THINKING = "<think></think>"


@pytest.mark.parametrize(
    "prompt, template, accepted, refused",
    [
        ("assistant:<think>\n", THINKING, ['hm</think>\n\n{"a":1}', "</think>{}"], ['{"a":1}', "hm", "hm</think>x"]),
        ("assistant:", THINKING, ["<think>\nhm {\n</think>{}", "{}"], ["hm</think>{}", "<think>{}"]),
        ("assistant:<think>\n\n</think>\n\n", THINKING, ["{}"], ["<think></think>{}"]),
        ("assistant:", "no thoughts", ["{}"], ["<think></think>{}"]),
    ],
    ids=["open", "possible", "closed", "none"],
)
def test_thought_precedes_constrained_response(prompt, template, accepted, refused):
    matcher = matcher_of({"response_format": {"type": "json_object"}}, template, prompt)
    assert [text for text in accepted if not accepts(matcher, text)] == []
    assert [text for text in refused if accepts(matcher, text)] == []


# The endpoint, by the official client


@pytest.mark.slow
async def test_official_client_parse_returns_objects(chat_client):
    """Whole and streamed; a random model needs many samples for answers that end in time."""
    complete = 0
    for seed in range(4):
        answer = await chat_client.chat.completions.create(
            model="tiny", messages=HELLO, response_format=_format(Item), n=4, seed=seed, max_tokens=180, logprobs=True
        )
        for choice in answer.choices:
            if choice.finish_reason == "stop":
                complete += 1
                Item.model_validate_json(choice.message.content)
    assert complete >= 6
    parsed = await chat_client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Tag, max_tokens=200, temperature=0.7, seed=1
    )
    assert parsed.choices[0].message.parsed.name in ("red", "blue")
    answered = await chat_client.responses.parse(
        model="tiny", input=HELLO, text_format=Tag, max_output_tokens=200, temperature=0
    )
    assert answered.output_parsed.name in ("red", "blue")
    async with chat_client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Tag, max_tokens=200, temperature=0.7, seed=1
    ) as stream:
        final = await stream.get_final_completion()
    # The same seed: a stream is the same answer, token for token.
    assert final.choices[0].message.content == parsed.choices[0].message.content
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


def _format(model: type[BaseModel]) -> Any:
    return {
        "type": "json_schema",
        "json_schema": {"name": model.__name__, "schema": model.model_json_schema(), "strict": True},
    }


@pytest.mark.slow
async def test_required_and_named_tool_choices_force_call(tool_engine, tool_model):
    """A model that has learned other things calls what it must, with arguments of the schema."""
    async with serving(tool_engine, tool_model) as server, client_of(server) as client:
        for stream in (False, True):
            for choice, names in [("required", {"subtract", "add"}), (NAMED, {"subtract"})]:
                asked: Any = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": "Bye"}],
                    "tools": [SUBTRACT, CLOSED_ADD],
                    "tool_choice": choice,
                    "parallel_tool_calls": False,
                    "max_tokens": 300,
                    "temperature": 0.3,
                    "seed": 5,
                }
                if stream:
                    async with client.chat.completions.stream(**asked) as events:
                        completion = await events.get_final_completion()
                else:
                    completion = await client.chat.completions.create(**asked)
                [answered] = completion.choices
                assert answered.finish_reason == "tool_calls"
                [call] = answered.message.tool_calls
                assert call.function.name in names
                tool = CLOSED_ADD if call.function.name == "add" else SUBTRACT
                jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])
        free = await client.chat.completions.create(
            model="tiny", messages=[QUESTION], tools=[ADD], tool_choice="auto", temperature=0, max_tokens=80
        )
        assert free.choices[0].message.tool_calls[0].function.name == "add"


@pytest.mark.parametrize(
    "wrong, param, says",
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"response_format": "json"}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "name and schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}},
            "response_format",
            "3",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strng"}}}},
            "response_format",
            "strng",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
            "not",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"enum": ["x" * 99999]}},
                }
            },
            "response_format",
            "100000 characters",
        ),
        ({"tool_choice": "required"}, "tool_choice", "only allowed when tools"),
        ({"tools": [ADD], "tool_choice": NAMED}, "tool_choice", "the tools are add"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "'required'"),
        (
            {
                "tools": [ADD],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"function": "add"}]},
                },
            },
            "tool_choice",
            "'required'",
        ),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"continue_final_message": True}},
            "response_format",
            "continue_final_message",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort", "chat template"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "'low'"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, None, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, None, "logit_bias"),
        ({"frequency_penalty": 3}, None, "frequency_penalty"),
    ],
    ids=lambda value: None,
)
async def test_invalid_response_format_error_names_reason(chat_client, wrong, param, says):
    with pytest.raises(openai.BadRequestError, match=says) as raised:
        await chat_client.chat.completions.create(**({"model": "tiny", "messages": HELLO, "max_tokens": 4} | wrong))
    assert raised.value.param == param


async def test_engine_without_constraints_error_names_reason(chat_engine, chat_model, monkeypatch):
    described = await chat_engine.describe()
    features = ("json_schema", "grammar", "penalties", "logit_bias", "top_log_probs", "prompt_top_log_probs")
    info = described.__class__(**(vars(described) | {"unsupported": dict.fromkeys(features, "no such thing")}))

    async def describe() -> Any:
        return info

    monkeypatch.setattr(chat_engine, "describe", describe)
    async with serving(chat_engine, chat_model) as server, client_of(server) as client:
        for field, value in [
            ("response_format", {"type": "json_object"}),
            ("presence_penalty", 1),
            ("logit_bias", {"5": 1}),
        ]:
            with pytest.raises(openai.BadRequestError, match=f"{field}: .* no such thing") as raised:
                await client.chat.completions.create(model="tiny", messages=HELLO, **{field: value})
            assert (raised.value.code, raised.value.param) == ("unsupported_by_engine", field)
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            await client.completions.create(model="tiny", prompt="a", logprobs=1, max_tokens=1)


# Log-probs and the rest


async def test_top_log_probs_of_responses_and_prompts(chat_client):
    """Likeliest tokens in chat, in completions and streamed; with echo those of the prompt, as evaluations of choices
    read them."""
    chat = await chat_client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0, seed=1
    )
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob
    chunks = await chat_client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0, seed=1, stream=True
    )
    pieces = [
        chunk.choices[0].logprobs.content async for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
    ]
    assert [entry for piece in pieces for entry in piece] == chat.choices[0].logprobs.content

    [asked, scored] = [
        (
            await chat_client.completions.create(
                model="tiny", prompt=[[40, 41, 42]], echo=True, logprobs=2, max_tokens=num, temperature=0
            )
        )
        .choices[0]
        .logprobs
        for num in (1, 0)
    ]
    assert (len(asked.tokens), len(scored.tokens)) == (4, 3)
    assert asked.top_logprobs[0] is None
    for own, top in zip(asked.token_logprobs[1:], asked.top_logprobs[1:], strict=True):
        assert 2 <= len(top) <= 3
        assert own <= max(top.values())
    assert asked.token_logprobs[3] == max(asked.top_logprobs[3].values())
    assert scored.top_logprobs == asked.top_logprobs[:3]


async def test_penalties_and_biases_reach_engine(chat_client):
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 0}
    biased = await chat_client.chat.completions.create(**asked, logit_bias={"44": 100})
    assert set(biased.choices[0].message.content) == {"H"}
    penalized = await chat_client.chat.completions.create(
        **asked, logit_bias={str(token): 5 for token in (44, 45, 46)}, presence_penalty=2, frequency_penalty=2
    )
    plain = await chat_client.chat.completions.create(**asked)
    assert len(set(penalized.choices[0].message.content)) > len(set(plain.choices[0].message.content))
    streamed = await chat_client.chat.completions.create(
        **asked,
        logit_bias={str(token): 5 for token in (44, 45, 46)},
        presence_penalty=2,
        frequency_penalty=2,
        stream=True,
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in streamed])
    assert text == penalized.choices[0].message.content


@pytest.mark.parametrize(
    "source, effort, kwargs",
    [
        ("{{ reasoning_effort }}", "high", {"reasoning_effort": "high"}),
        ("{% if enable_thinking %}", "none", {"enable_thinking": False}),
        ("{% if enable_thinking %}", "low", {"enable_thinking": True}),
        ("plain", "none", {}),
        ("plain", None, {}),
    ],
)
def test_reasoning_effort_sets_template_variables(source, effort, kwargs):
    assert EndpointTemplate(build_character_tokenizer(source)).get_effort_kwargs(effort) == kwargs
