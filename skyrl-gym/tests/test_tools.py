import asyncio
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.error import InfraError
from skyrl_gym.tools import CalculatorToolGroup, ToolGroup, tool
from skyrl_gym.tools.calculator import CalculatorError, evaluate_expression
from skyrl_gym.tools.signature import ArgumentError, parse_docstring, read, schema_of


class Greetings(ToolGroup):
    def __init__(self, language="en"):
        self.word = {"en": "hello", "de": "hallo"}[language]
        super().__init__(name="Greetings")

    @tool
    def greet(self, name, loudly=False):
        """Says hello."""
        return f"{self.word} {name}{'!' if loudly else ''}"

    def not_a_tool(self):
        return self.word


class MoreGreetings(Greetings):
    @tool
    def bye(self):
        return "bye"


def test_marked_methods_are_tools_and_know_their_instance():
    english, german = Greetings(), Greetings("de")
    assert english.get_tool_names() == ["greet"]
    assert english.execute_tool("greet", "Ann") == "hello Ann"
    assert german.execute_tool("greet", "Ann", loudly=True) == "hallo Ann!"
    assert english.call("greet", {"name": "Ann"}) == english.execute_tool("greet", name="Ann") == "hello Ann"
    assert german.greet("Bob") == "hallo Bob"  # still an ordinary method
    assert isinstance(Greetings.greet, tool) and Greetings.greet.__doc__ == "Says hello."
    assert english.get_name() == "Greetings" and english.get_tool("shout") is None
    with pytest.raises(ValueError, match=r"'shout' .*'Greetings'"):
        english.execute_tool("shout")


def test_inherited_tools_are_found_in_alphabetical_order():
    group = MoreGreetings()
    assert group.get_tool_names() == ["bye", "greet"]
    assert group.get_tool_to_group_mapping() == {"bye": "Greetings", "greet": "Greetings"}


def test_environment_calls_tool_by_unique_group_and_name():
    env = BaseTextEnv()
    env.init_tool_groups([Greetings(), CalculatorToolGroup()])
    assert env.tool_to_toolgroup == {"greet": "Greetings", "calculator": "CalculatorToolGroup"}
    assert env._execute_tool("Greetings", "greet", ["Ann"]) == "hello Ann"
    with pytest.raises(ValueError, match="'Search'"):
        env._execute_tool("Search", "search", ["x"])
    with pytest.raises(TypeError, match="must be a list or tuple"):
        env._execute_tool("Greetings", "greet", "Ann")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'greet'"):
        BaseTextEnv().init_tool_groups([Greetings(), MoreGreetings()])


@pytest.mark.parametrize(
    "expression, value",
    [
        ("37*48", 1776),
        (" 2 + 3 * (4 - 1) ", 11),
        ("84/2", 42),  # whole, so no 42.0
        ("1/4", 0.25),
        ("7//2", 3),
        ("7%4", 3),
        ("-2**2", -4),
        ("2**-1", 0.5),
        ("+.5", 0.5),
        ("(" * 99 + "1" + ")" * 99, 1),  # deep, but arithmetic
    ],
)
def test_calculator_evaluates_arithmetic(expression, value):
    assert evaluate_expression(expression) == value
    assert type(evaluate_expression(expression)) is type(value)


@pytest.mark.parametrize(
    "expression, reason",
    [
        ("", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("a+1", "only numbers"),
        ("1,2", "only numbers"),
        ("1+", "not an arithmetic expression"),
        ("((((1", "not an arithmetic expression"),
        ("()", "is not arithmetic"),
        ("1(2)", "is not arithmetic"),
        ("1/0", "division by zero"),
        ("1%0", "division by zero"),
        ("9**9**9", "exponent 387420489 is over 64"),
        ("(9**60)**60", "too large"),
        ("(10.0**60)**60", "too large"),
        ("(-8)**.5", "not a real number"),
        ("1+" * 100 + "1", "longer than 200"),
    ],
)
def test_calculator_rejects_everything_else_fast(expression, reason):
    with pytest.raises(CalculatorError, match=reason):
        evaluate_expression(expression)


# what a model is told of a tool


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Box:
    width: int
    depth: float = 1.0

    def __post_init__(self):
        if self.width < 0:
            raise ValueError("width is negative")


class Filter(TypedDict):
    field: str
    values: NotRequired[list[str]]


class Warehouse(ToolGroup):
    def __init__(self):
        self.seen: list[Any] = []
        super().__init__("Warehouse")

    @tool
    def find(
        self,
        query: str,
        limit: int = 10,
        order: Literal["asc", "desc"] = "asc",
        price: Annotated[float | None, "at most, in euros"] = None,
    ) -> str:
        """Finds goods.

        The search is exact.

        Args:
            query: What to look for,
                word by word.
            limit (int): How many: at most 100.

        Returns:
            Names.
        """
        return f"{query} {limit} {order} {price}"

    @tool(name="pack-it", description="Packs.")
    def pack(self, box: Box, colour: Colour, filters: list[Filter] | None = None) -> dict[str, Any]:
        self.seen.append((box, colour, filters))
        return {"packed": True, "näme": colour.value}

    @tool
    async def fetch(self, seconds: float = 0.0) -> str:
        await asyncio.sleep(seconds)
        return threading.current_thread().name

    @tool
    def burn(self, kind: str):
        raise {"infra": InfraError("no matches"), "bug": ZeroDivisionError("division by zero"), "mute": KeyError()}[
            kind
        ]


def schema_named(name: str) -> dict[str, Any]:
    return next(schema["function"] for schema in Warehouse().schemas() if schema["function"]["name"] == name)


def test_schema_is_built_from_hints_and_docstring():
    assert schema_named("find") == {
        "name": "find",
        "description": "Finds goods.\n\nThe search is exact.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for, word by word."},
                "limit": {"type": "integer", "description": "How many: at most 100.", "default": 10},
                "order": {"type": "string", "enum": ["asc", "desc"], "default": "asc"},
                "price": {"type": ["number", "null"], "description": "at most, in euros", "default": None},
            },
            "required": ["query"],
        },
    }


def test_tool_name_and_description_can_be_set():
    schema = schema_named("pack-it")
    assert schema["description"] == "Packs."
    assert schema["parameters"]["required"] == ["box", "colour"]
    assert schema["parameters"]["properties"]["box"] == {
        "type": "object",
        "properties": {"width": {"type": "integer"}, "depth": {"type": "number"}},
        "required": ["width"],
        "additionalProperties": False,
    }
    assert Warehouse().get_tool_names() == ["burn", "fetch", "find", "pack-it"]
    json.dumps(Warehouse().schemas())
    assert CalculatorToolGroup().schemas()[0]["function"]["parameters"]["required"] == ["expression"]


@pytest.mark.parametrize(
    "hint, schema",
    [
        (str, {"type": "string"}),
        (None, {"type": "null"}),
        (Any, {}),
        (Optional[int], {"type": ["integer", "null"]}),  # noqa: UP045
        (list, {"type": "array"}),
        (list[list[int]], {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (dict, {"type": "object"}),
        (Literal[1, 2], {"type": "integer", "enum": [1, 2]}),
        (Literal["a", None], {"enum": ["a", None]}),
        (Colour, {"type": "string", "enum": ["red", "blue"]}),
        (list[str] | str, {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}),
        (Annotated[str, "a text"], {"type": "string", "description": "a text"}),
        (
            tuple[int, str],
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        ),
    ],
)
def test_hint_to_schema(hint, schema):
    assert schema_of(hint) == schema


class Node(TypedDict):
    next: "Node"


@pytest.mark.parametrize("hint", [bytes, object(), dict[int, str], Literal[b"x"], Node])
def test_hint_without_json_form_is_rejected(hint):
    with pytest.raises(TypeError):
        schema_of(hint)


def test_invalid_tool_is_rejected_at_definition_or_construction():
    with pytest.raises(TypeError, match=r"\*numbers"):

        class Sums(ToolGroup):
            @tool
            def total(self, *numbers: int) -> int:
                return sum(numbers)

    with pytest.raises(ValueError, match="tool name 'add up'"):

        class Named(ToolGroup):
            @tool(name="add up")
            def total(self) -> int:
                return 0

    class Twins(ToolGroup):
        @tool(name="twin")
        def one(self): ...

        @tool(name="twin")
        def two(self): ...

    with pytest.raises(ValueError, match="'twin'"):
        Twins("Twins")


def test_docstring_entry_may_describe_several_arguments():
    said = parse_docstring("Moves.\n\nArgs:\n    x, y: Metres.\n    **rest: More.\n\nIt is fast.")
    assert said.description == "Moves.\n\nIt is fast."
    assert said.arguments == {"x": "Metres.", "y": "Metres.", "rest": "More."}
    assert parse_docstring(None) == ("", {})


# a call as a model wrote it


@pytest.mark.parametrize(
    "name, arguments, answer",
    [
        ("find", {"query": "nails"}, "nails 10 asc None"),
        ("find", {"query": "nails", "limit": "5", "price": "2.5"}, "nails 5 asc 2.5"),  # formats that know only text
        ("find", {"query": "5", "limit": 5.0}, "5 5 asc None"),
        ("find", {"query": "nails", "limit": None}, "nails 10 asc None"),  # null for "as usual"
        ("find", {"": "nails"}, "nails 10 asc None"),  # formats with one argument that has no name
        ("fin", {}, "Error: there is no tool 'fin'; did you mean find?"),
        ("launch", {}, "Error: there is no tool 'launch'; known are burn, fetch, find, pack-it"),
        ("find", {}, "Error calling find: argument 'query' (string) is missing"),
        ("find", {"query": 3}, "Error calling find: argument 'query' must be string; got 3"),
        ("find", {"query": "x", "limit": "many"}, "Error calling find: argument 'limit' must be integer; got \"many\""),
        ("find", {"query": "x", "limit": True}, "Error calling find: argument 'limit' must be integer; got true"),
        ("find", {"query": "x", "order": "up"}, 'argument \'order\' must be one of "asc", "desc"; got "up"'),
        ("find", {"query": "x", "q": 1}, 'there is no argument "q"; it takes query, limit, order, price'),
        ("find", ["query"], "Error calling find: the arguments must be an object with a value for each name"),
        ("pack-it", {"box": {"width": 2}, "colour": "red"}, '{"packed": true, "näme": "red"}'),
        ("pack-it", {"box": '{"width": 2}', "colour": "red", "filters": "[]"}, '{"packed": true, "näme": "red"}'),
        ("pack-it", {"box": {}, "colour": "red"}, "argument 'box' must have the field 'width' (integer)"),
        ("pack-it", {"box": {"width": "a"}, "colour": "red"}, "argument 'box.width' must be integer"),
        ("pack-it", {"box": {"width": 1, "height": 1}, "colour": "red"}, "'box' has no field \"height\"; it has width"),
        ("pack-it", {"box": {"width": -1}, "colour": "red"}, "argument 'box': width is negative"),
        ("pack-it", {"box": {"width": 1}, "colour": "green"}, "argument 'colour' must be one of"),
        ("pack-it", {"box": {"width": 1}, "colour": "red", "filters": [{"field": 1}]}, "argument 'filters' must be"),
        ("burn", {"kind": "bug"}, "Error in burn: division by zero"),
        ("burn", {"kind": "mute"}, "Error in burn: KeyError"),
    ],
)
def test_call_returns_text(name, arguments, answer):
    assert answer in Warehouse().call(name, arguments)


def test_arguments_are_converted_to_hinted_types():
    group = Warehouse()
    group.call("pack-it", {"box": {"width": 2, "depth": 3}, "colour": "blue", "filters": [{"field": "f"}]})
    assert group.seen == [(Box(2, 3.0), Colour.BLUE, [{"field": "f"}])]
    assert isinstance(group.seen[0][0].depth, float)


@pytest.mark.parametrize(
    "hint, value, result",
    [
        (str | int, "5", "5"),  # no reading of what fits as it is
        (int | list[int], "[1]", [1]),
        (bool, "True", True),
        (tuple[int, ...], [1, 2], (1, 2)),
        (set[int], [1, 1], {1}),
        (dict[str, list[int]], {"a": ["1"]}, {"a": [1]}),
        (Literal[1, "1"], "1", "1"),
    ],
)
def test_values_are_read_by_their_hint(hint, value, result):
    assert read(hint, value, "x") == result


@pytest.mark.parametrize(
    "hint, value",
    [
        (int, "[" * 100_000),
        (int, "9" * 10_000),
        (float, 10**400),
        (float, float("nan")),
        (set[list[int]], [[1]]),
        (tuple[int, int], [1]),
        (dict[str, int], {"a": "b"}),
        (int, 1.5),
    ],
)
def test_mismatched_values_are_rejected_with_short_text(hint, value):
    with pytest.raises(ArgumentError) as refused:
        read(hint, value, "x")
    assert len(str(refused.value)) < 300


def test_errors_outside_model_control_are_raised():
    with pytest.raises(InfraError, match="no matches"):
        Warehouse().call("burn", {"kind": "infra"})


def test_uncallable_tool_raises_type_error():
    class Files(ToolGroup):
        @tool
        def send(self, data: bytes, to: "Nowhere"):  # type: ignore[name-defined] # noqa: F821
            return "sent"

    group = Files("Files")
    assert group.execute_tool("send", b"x", None) == "sent"  # code can
    for ask in (group.schemas, lambda: group.call("send", {"data": "x", "to": ""})):
        with pytest.raises(TypeError, match=r"send: .*'Nowhere'"):
            ask()


def test_async_tool_is_awaited_up_to_deadline():
    async def inside_a_loop() -> str:
        return Warehouse().execute_tool("fetch")

    assert Warehouse().call("fetch", {}) == asyncio.run(inside_a_loop()) == "tools"
    group = Warehouse()
    group.async_timeout = 0.05  # type: ignore[misc]
    assert group.call("fetch", {"seconds": 60}) == "Error in fetch: no result within 0.05 seconds"


def test_async_tool_calling_group_synchronously_raises():
    class Chain(ToolGroup):
        @tool
        async def outer(self) -> str:
            return self.execute_tool("inner")

        @tool
        async def inner(self) -> str:
            return "in"

    assert "use await" in Chain("Chain").call("outer", {})


def test_tools_import_only_used_libraries():
    heavy = "httpx mcp pydantic sqlite3 asyncio pandas"
    code = f"import sys, skyrl_gym.tools.core; print([name for name in '{heavy}'.split() if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.strip() == "[]"
