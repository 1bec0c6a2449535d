"""Gymnasium's spaces in words and JSON: what an action may be, reading one, writing an observation.

JSON of a value: Discrete a whole number; Box, MultiDiscrete, MultiBinary nested lists (a bare number for shape ());
Text a string; Tuple and Sequence a list; Dict an object; OneOf `[index, value]`; Graph an object with `nodes`, and
`edges` and `edge_links` (pairs of node numbers) if it has edges.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

MAX_LISTED_BOUNDS = 32
"""Bounds of an array whose entries differ are listed one by one up to this many."""

MAX_LISTED_CHARACTERS = 70


class IllegalAction(Exception):
    """What a model wrote is not in the space. The text names the rule."""


# In words


@functools.singledispatch
def describe(space: spaces.Space) -> str:
    """The values of a space, in words."""
    return f"a value of {space}"


@describe.register
def _(space: spaces.Discrete) -> str:
    return f"a whole number from {space.start} to {space.start + space.n - 1}"


@describe.register
def _(space: spaces.Box) -> str:
    kind = "whole number" if np.issubdtype(space.dtype, np.integer) else "number"
    low, high = np.unique(space.low), np.unique(space.high)
    same = len(low) == len(high) == 1
    if space.shape == ():
        return f"a {kind} {_interval(low[0], high[0])}"
    text = f"a {_shape(space.shape)} {kind}s"
    if same:
        return f"{text}, each {_interval(low[0], high[0])}"
    if space.low.size > MAX_LISTED_BOUNDS:
        return f"{text}, within bounds that differ, all {_interval(space.low.min(), space.high.max())}"
    bounds = [_interval(a, b) for a, b in zip(space.low.flat, space.high.flat, strict=True)]
    return f"{text}: " + "; ".join(f"({i}) {bound}" for i, bound in enumerate(bounds, 1))


@describe.register
def _(space: spaces.MultiDiscrete) -> str:
    first, last = space.start, space.start + space.nvec - 1
    text = f"a {_shape(space.shape)} whole numbers"
    if len(np.unique(first)) == len(np.unique(last)) == 1:
        return f"{text}, each {_interval(first.flat[0], last.flat[0])}"
    bounds = [_interval(a, b) for a, b in zip(first.flat, last.flat, strict=True)]
    return f"{text}: " + "; ".join(f"({i}) {bound}" for i, bound in enumerate(bounds, 1))


@describe.register
def _(space: spaces.MultiBinary) -> str:
    return f"a {_shape(space.shape)} numbers, each 0 or 1"


@describe.register
def _(space: spaces.Text) -> str:
    characters = "".join(sorted(space.character_set))
    if len(characters) > MAX_LISTED_CHARACTERS:
        characters = characters[:MAX_LISTED_CHARACTERS] + f" ... ({len(characters)} in all)"
    return f"a string of {space.min_length} to {space.max_length} of the characters {characters}"


@describe.register
def _(space: spaces.Tuple) -> str:
    parts = "; ".join(f"({i}) {describe(part)}" for i, part in enumerate(space.spaces, 1))
    return f"a list of {len(space.spaces)} parts: {parts}"


@describe.register
def _(space: spaces.Dict) -> str:
    return "an object with " + "; ".join(f'"{key}": {describe(part)}' for key, part in space.spaces.items())


@describe.register
def _(space: spaces.Sequence) -> str:
    return f"a list of any length, each element {describe(space.feature_space)}"


@describe.register
def _(space: spaces.OneOf) -> str:
    choices = "; ".join(f"for k = {k}, {describe(part)}" for k, part in enumerate(space.spaces))
    return f"a list [k, value], where value is, {choices}"


@describe.register
def _(space: spaces.Graph) -> str:
    text = f'an object with "nodes": a list, each node {describe(space.node_space)}'
    if space.edge_space is None:
        return text
    return (
        f'{text}; and, if there are edges, "edges": a list, each edge {describe(space.edge_space)}, and '
        f'"edge_links": for each edge the list [from, to] of node numbers, counted from 0'
    )


def _shape(shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return f"list of {shape[0]}"
    return f"nested list of shape {' x '.join(map(str, shape))} of"


def _interval(low: Any, high: Any) -> str:
    if np.isinf(low) and np.isinf(high):
        return "of any size"
    if np.isinf(high):
        return f"of at least {low:g}"
    return f"of at most {high:g}" if np.isinf(low) else f"from {low:.10g} to {high:.10g}"


# From JSON


@functools.singledispatch
def read(space: spaces.Space, value: Any) -> Any:
    """The element of a space that a JSON value stands for. Raises IllegalAction."""
    [element] = space.from_jsonable([value])
    if not space.contains(element):
        raise IllegalAction(f"{_short(value)} is not {describe(space)}")
    return element


@read.register
def _(space: spaces.Discrete, value: Any) -> Any:
    if not _is_whole(value) or not space.start <= value < space.start + space.n:
        raise IllegalAction(f"{_short(value)} is not {describe(space)}")
    return space.dtype.type(int(value))  # pyright: ignore[reportOptionalMemberAccess]


@read.register
def _(space: spaces.Box, value: Any) -> Any:
    whole = np.issubdtype(space.dtype, np.integer)
    numbers = _array(space, value, whole)
    _check_bounds(numbers, space.low, space.high)
    if not whole:  # without bounds of its own, the space still ends where its precision does
        largest = np.finfo(space.dtype).max  # pyright: ignore[reportCallIssue, reportArgumentType]
        _check_bounds(numbers, np.full(space.shape, -largest), np.full(space.shape, largest))
    array = numbers.astype(space.dtype)
    if space.contains(array):
        return array
    # rounded to the space's own precision, a number may step over a bound that it kept
    return np.clip(array, space.low, space.high).astype(space.dtype)


@read.register
def _(space: spaces.MultiDiscrete, value: Any) -> Any:
    numbers = _array(space, value, whole=True)
    _check_bounds(numbers, space.start, space.start + space.nvec - 1)
    return numbers.astype(space.dtype)


@read.register
def _(space: spaces.MultiBinary, value: Any) -> Any:
    numbers = _array(space, value, whole=True)
    _check_bounds(numbers, np.zeros(space.shape), np.ones(space.shape))
    return numbers.astype(space.dtype)


@read.register
def _(space: spaces.Text, value: Any) -> Any:
    if not isinstance(value, str):
        raise IllegalAction(f"{_short(value)} is not a string")
    if not space.contains(value):
        raise IllegalAction(f"{_short(value)} is not {describe(space)}")
    return value


@read.register
def _(space: spaces.Tuple, value: Any) -> Any:
    parts = _list(value)
    if len(parts) != len(space.spaces):
        raise IllegalAction(f"a list of {len(space.spaces)} parts is needed, not of {len(parts)}")
    return tuple(_part(f"part {i}", s, part) for i, (s, part) in enumerate(zip(space.spaces, parts, strict=True), 1))


@read.register
def _(space: spaces.Dict, value: Any) -> Any:
    if not isinstance(value, Mapping) or set(value) != set(space.spaces):
        raise IllegalAction(f"{_short(value)} is not an object with exactly the keys {', '.join(space.spaces)}")
    return {key: _part(f'"{key}"', part, value[key]) for key, part in space.spaces.items()}


@read.register
def _(space: spaces.Sequence, value: Any) -> Any:
    elements = tuple(_part(f"element {i}", space.feature_space, item) for i, item in enumerate(_list(value), 1))
    return _stack(space.feature_space, elements) if space.stack else elements


@read.register
def _(space: spaces.OneOf, value: Any) -> Any:
    parts = _list(value)
    if len(parts) != 2 or not _is_whole(parts[0]) or not 0 <= parts[0] < len(space.spaces):
        raise IllegalAction(f"{_short(value)} is not a list [k, value] with k from 0 to {len(space.spaces) - 1}")
    return int(parts[0]), _part(f"the value for k = {parts[0]}", space.spaces[int(parts[0])], parts[1])


@read.register
def _(space: spaces.Graph, value: Any) -> Any:
    if not isinstance(value, Mapping) or not {"nodes"} <= set(value) <= {"nodes", "edges", "edge_links"}:
        raise IllegalAction(f"{_short(value)} is not an object with nodes, edges and edge_links")
    nodes = [_part(f"node {i}", space.node_space, node) for i, node in enumerate(_list(value["nodes"]))]
    if not nodes:
        raise IllegalAction("a graph needs a node")
    edges, links = value.get("edges"), value.get("edge_links")
    if edges is None and links is None:
        return spaces.GraphInstance(_stack(space.node_space, nodes), None, None)
    if space.edge_space is None:
        raise IllegalAction("the graph has no edges")
    read_edges = [_part(f"edge {i}", space.edge_space, edge) for i, edge in enumerate(_list(edges))]
    pairs = _list(links)
    if len(pairs) != len(read_edges) or not all(_is_link(pair, len(nodes)) for pair in pairs):
        raise IllegalAction(
            f"edge_links must be one list [from, to] of node numbers 0 to {len(nodes) - 1} for each edge"
        )
    return spaces.GraphInstance(
        _stack(space.node_space, nodes),
        _stack(space.edge_space, read_edges),
        np.array(pairs, dtype=np.int32).reshape(-1, 2),
    )


def _is_link(pair: Any, num_nodes: int) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(_is_whole(n) and 0 <= n < num_nodes for n in pair)


def _part(name: str, space: spaces.Space, value: Any) -> Any:
    try:
        return read(space, value)
    except IllegalAction as fault:
        raise IllegalAction(f"{name}: {fault}") from None


def _stack(space: spaces.Space, elements: Sequence[Any]) -> Any:
    stacked = create_empty_array(space, n=len(elements))
    return concatenate(space, elements, stacked) if elements else stacked


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value) and abs(value) < 2**63


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise IllegalAction(f"{_short(value)} is not a list")
    return value


def _array(space: spaces.Space, value: Any, whole: bool) -> np.ndarray:
    """Numbers in the space's shape. A bare number may stand for a list of one."""
    shape: tuple[int, ...] = space.shape  # pyright: ignore[reportAssignmentType]
    if shape == (1,) and not isinstance(value, list):
        value = [value]
    flat: list[Any] = []
    _flatten(value, shape, flat)
    for number in flat:
        if not (_is_whole(number) if whole else _is_number(number)):
            raise IllegalAction(f"{_short(number)} is not a {'whole' if whole else 'finite'} number")
    return np.array(flat, dtype=np.int64 if whole else np.float64).reshape(shape)


def _flatten(value: Any, shape: tuple[int, ...], into: list[Any]) -> None:
    if not shape:
        into.append(value)
        return
    if not isinstance(value, list) or len(value) != shape[0]:
        raise IllegalAction(f"{_short(value)} is not a {_shape(shape)} numbers")
    for part in value:
        _flatten(part, shape[1:], into)


def _check_bounds(numbers: np.ndarray, low: Any, high: Any) -> None:
    outside = np.argwhere((numbers < low) | (numbers > high))
    if len(outside):
        place = tuple(outside[0])
        which = f"number {', '.join(str(i + 1) for i in place)}, " if place else ""
        bounds = _interval(np.asarray(low)[place], np.asarray(high)[place])
        raise IllegalAction(f"{which}{_short(numbers[place].item())}, must be {bounds}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# To JSON


@functools.singledispatch
def to_json(space: spaces.Space, element: Any) -> Any:
    """The JSON value of an element of a space."""
    [value] = space.to_jsonable([element])
    return value


@to_json.register
def _(space: spaces.Discrete, element: Any) -> Any:
    return int(element)


@to_json.register(spaces.Box)
@to_json.register(spaces.MultiDiscrete)
@to_json.register(spaces.MultiBinary)
def _(space: spaces.Space, element: Any) -> Any:
    return np.asarray(element).tolist()


@to_json.register
def _(space: spaces.Text, element: Any) -> Any:
    return str(element)


@to_json.register
def _(space: spaces.Tuple, element: Any) -> Any:
    return [to_json(part, value) for part, value in zip(space.spaces, element, strict=True)]


@to_json.register
def _(space: spaces.Dict, element: Any) -> Any:
    return {key: to_json(part, element[key]) for key, part in space.spaces.items()}


@to_json.register
def _(space: spaces.Sequence, element: Any) -> Any:
    elements = iterate(space.stacked_feature_space, element) if space.stack else element
    return [to_json(space.feature_space, value) for value in elements]


@to_json.register
def _(space: spaces.OneOf, element: Any) -> Any:
    index, value = element
    return [int(index), to_json(space.spaces[int(index)], value)]


@to_json.register
def _(space: spaces.Graph, element: Any) -> Any:
    graph: dict[str, Any] = {
        "nodes": [to_json(space.node_space, node) for node in iterate(space.batch_node_space, element.nodes)]
    }
    if element.edges is not None and space.edge_space is not None:
        edges = iterate(space.batch_edge_space, element.edges)
        graph["edges"] = [to_json(space.edge_space, edge) for edge in edges]
        graph["edge_links"] = np.asarray(element.edge_links).tolist()
    return graph
