"""Constrained answers of a random model for random JSON schemas: whatever is drawn, a complete answer is valid."""

import asyncio
import json
import random
from typing import Any

import jsonschema
import pytest

from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

pytest.importorskip("llguidance", reason="the extra constrained is not installed")

PROMPT = list(range(10, 20))


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of what language models are asked for: objects, lists, numbers with bounds, enumerations, patterns,
    alternatives, formats, definitions."""
    simple = [_string, _number, _enumeration, _boolean]
    kind = draw.choice(simple if depth >= 2 else [*simple, _object, _object, _list, _alternatives, _tuple])
    return kind(draw, depth)


def _string(draw: random.Random, _depth: int) -> dict[str, Any]:
    return draw.choice(
        [
            {"type": "string", "maxLength": draw.randint(0, 6)},
            {
                "type": "string",
                "pattern": draw.choice([r"^[a-c]{1,3}$", r"^\d{2}-\d{2}$", r"^(x|yz)+$"]),
                "maxLength": 9,
            },
            {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4"])},
        ]
    )


def _number(draw: random.Random, _depth: int) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    bounds: dict[str, Any] = {draw.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + draw.randint(1, 300)}
    kind = draw.choice(["integer", "number"])
    return (
        {"type": kind}
        | bounds
        | ({"multipleOf": 3} if kind == "integer" and low > 0 and bounds["maximum"] - low > 9 else {})
    )


def _enumeration(draw: random.Random, _depth: int) -> dict[str, Any]:
    values = draw.sample(["a", "two words", 'quo"te', 1, -2.5, None, True, ["x", {}], {"k": 1}], draw.randint(1, 4))
    return {"enum": values} if draw.random() < 0.8 else {"const": values[0]}


def _boolean(draw: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(["id", "name", "a b", "u-v", 'q"', "items", "n"], draw.randint(0, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        "additionalProperties": draw.choice([False, {"type": "integer", "minimum": 0, "maximum": 9}]),
    }
    if draw.random() < 0.3:
        schema |= {"$defs": {"leaf": random_schema(draw, 2)}}
        schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf"} if depth == 0 else {"type": "boolean"}
    return schema


def _list(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(draw, depth + 1),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _tuple(draw: random.Random, depth: int) -> dict[str, Any]:
    return {
        "type": "array",
        "prefixItems": [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))],
        "items": False,
    }


def _alternatives(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


async def check_schemas(engine: NativeInferenceEngine, seeds: range) -> int:
    """Ask for three answers of each schema, all at the same time. Returns: the number of complete answers."""
    schemas = [random_schema(random.Random(seed)) for seed in seeds]
    outputs = await asyncio.gather(
        *(
            engine.generate_batch(
                InferenceEngineInput(
                    prompt_token_ids=[PROMPT] * 3,
                    sampling_params={
                        "constraint": {"json_schema": schema},
                        "max_tokens": 240,
                        "seed": seed,
                        "temperature": 0.8,
                    },
                )
            )
            for seed, schema in zip(seeds, schemas, strict=True)
        )
    )
    complete = 0
    for seed, schema, output in zip(seeds, schemas, outputs, strict=True):
        for text, reason in zip(output["responses"], output["stop_reasons"], strict=True):
            if reason == "stop":
                complete += 1
                try:
                    jsonschema.validate(json.loads(text), schema)
                except ValueError as error:
                    raise AssertionError(f"schema {seed}, {schema}: {text!r} is not valid: {error}") from error
    return complete


@pytest.fixture(scope="module")
def engine(chat_model: str):
    engine = NativeInferenceEngine(chat_model, device="cpu", dtype="float32", max_num_seqs=48)
    yield engine
    asyncio.run(engine.teardown())


async def test_complete_answers_are_valid_for_random_schemas(engine):
    assert await check_schemas(engine, range(12)) >= 20


@pytest.mark.full
async def test_complete_answers_are_valid_for_200_random_schemas(engine):
    complete = sum([await check_schemas(engine, range(start, start + 20)) for start in range(0, 200, 20)])
    assert complete >= 400
