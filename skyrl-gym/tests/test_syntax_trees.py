"""Python source is parsed although other code of the process parses in between."""

import ast
import gc

import pytest

from skyrl_gym.syntax_trees import parse_source

SOURCE = "\n".join(f"value_{number} = [{number}, ({number}, 'text')]" for number in range(500))


@pytest.fixture
def parses_in_collections():
    """Function that sets in how many garbage collections, which interrupt a conversion, something else is parsed."""
    left = 0

    def parse(phase: str, _: object) -> None:
        nonlocal left
        if phase == "start" and left:
            left -= 1
            ast.parse("x = 1")

    def set_number(number: int) -> None:
        nonlocal left
        left = number

    threshold = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(50)
    yield set_number
    gc.set_threshold(*threshold)
    gc.callbacks.remove(parse)


def test_parse_succeeds_when_garbage_collection_parses_meanwhile(parses_in_collections):
    expected = ast.dump(ast.parse(SOURCE))
    parses_in_collections(5)
    assert ast.dump(parse_source(SOURCE)) == expected


def test_faults_of_source_are_raised_as_by_ast():
    with pytest.raises(SyntaxError):
        parse_source("def f(:")
    assert isinstance(parse_source("1 + 2", mode="eval"), ast.Expression)
