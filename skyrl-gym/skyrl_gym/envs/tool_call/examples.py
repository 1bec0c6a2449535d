"""Tasks with several functions to choose from, and policies that call without reading the request."""

import json
from collections.abc import Callable

from skyrl_gym.call_arguments import Schema
from skyrl_gym.envs.base_text_env import ConversationType, Example
from skyrl_gym.envs.tool_call.prompt import system_message


def _make_function(name: str, description: str, required: list[str], **properties: Schema) -> Schema:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": description, "parameters": parameters}


TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}

FUNCTIONS = [
    _make_function(
        "book_table",
        "Books a table at a restaurant.",
        ["restaurant", "guests"],
        restaurant=TEXT,
        guests={"type": "integer"},
        outside={"type": "boolean", "description": "default: false"},
    ),
    _make_function("convert_length", "Converts a length.", ["value", "unit", "to"], value=NUMBER, unit=TEXT, to=TEXT),
    _make_function(
        "plan_route",
        "Plans a route through stops, in their order.",
        ["stops"],
        stops={"type": "array", "items": TEXT},
        options={"type": "object", "properties": {"avoid": TEXT, "stay_minutes": {"type": "integer"}}},
    ),
]

_TASKS: list[tuple[str, list[dict[str, dict[str, list[object]]]], list[tuple[str, dict[str, object]]]]] = [
    (
        "A table for five at the Blue Heron, please.",
        [{"book_table": {"restaurant": ["Blue Heron", "The Blue Heron"], "guests": [5], "outside": [False, ""]}}],
        [("book_table", {"restaurant": "Blue Heron", "guests": 5})],
    ),
    (
        "How many feet are 12.5 metres, and how many inches are 40 centimetres?",
        [
            {"convert_length": {"value": [12.5], "unit": ["m", "metre", "metres"], "to": ["ft", "foot", "feet"]}},
            {"convert_length": {"value": [40], "unit": ["cm", "centimetre", "centimetres"], "to": ["in", "inches"]}},
        ],
        [
            ("convert_length", {"value": 40, "unit": "cm", "to": "inches"}),
            ("convert_length", {"value": 12.5, "unit": "metres", "to": "feet"}),
        ],
    ),
    (
        "Plan my way from Hask to Quillmere by the Saltbridge, without toll roads, with half an hour at each stop.",
        [
            {
                "plan_route": {
                    "stops": [["Hask", "Saltbridge", "Quillmere"]],
                    "options": [{"avoid": ["toll", "tolls", "toll roads"], "stay_minutes": [30]}],
                }
            }
        ],
        [
            (
                "plan_route",
                {"stops": ["Hask", "Saltbridge", "Quillmere"], "options": {"avoid": "toll roads", "stay_minutes": 30}},
            )
        ],
    ),
    (
        "We are three and want to sit in the garden of Lantern House. Then show us the way from there to Hask.",
        [
            {"book_table": {"restaurant": ["Lantern House"], "guests": [3], "outside": [True]}},
            {"plan_route": {"stops": [["Lantern House", "Hask"]], "options": [""]}},
        ],
        [
            ("book_table", {"restaurant": "Lantern House", "guests": 3, "outside": True}),
            ("plan_route", {"stops": ["Lantern House", "Hask"]}),
        ],
    ),
]


def make_examples() -> list[Example]:
    return [_make_example(request, expected, calls) for request, expected, calls in _TASKS]


def _make_example(request: str, expected: object, calls: list[tuple[str, dict[str, object]]]) -> Example:
    prompt: ConversationType = [system_message(FUNCTIONS), {"role": "user", "content": request}]
    return Example(prompt, {"reward_spec": {"method": "rule", "ground_truth": expected}}, [_format_calls(calls)])


def _format_calls(calls: list[tuple[str, dict[str, object]]]) -> str:
    objects = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def call_every_function(example: Example) -> list[str]:
    """Call each function without arguments."""
    return [_format_calls([(function["name"], {}) for function in FUNCTIONS])]


def pass_request(example: Example) -> list[str]:
    """Call each function with the whole request as every argument."""
    request: object = example.prompt[-1]["content"]
    names = {function["name"]: list(function["parameters"]["properties"]) for function in FUNCTIONS}
    return [_format_calls([(name, dict.fromkeys(arguments, request)) for name, arguments in names.items()])]


def repeat_calls(example: Example) -> list[str]:
    """Make the right calls and each of them again."""
    return [f"{example.oracle[-1]}\n{example.oracle[-1]}"]


def add_argument_to_calls(example: Example) -> list[str]:
    """Make the right calls with one more argument each."""
    return [example.oracle[-1].replace('"arguments": {', '"arguments": {"force": true, ')]


def write_calls_in_thought(example: Example) -> list[str]:
    """Write the right calls inside a thought."""
    return [f"<think>{example.oracle[-1]}</think> Done."]


CHEATS: list[Callable[[Example], list[str]]] = [
    call_every_function,
    pass_request,
    repeat_calls,
    add_argument_to_calls,
    write_calls_in_thought,
]
