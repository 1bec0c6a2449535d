"""Values as JSON, for two processes that do not trust each other. Decoding creates only plain values, and runs no code
of the peer. Values without a plain form (a class, a function, an object) are sent as references.

An atom is encoded as itself, anything else as `[tag, part, ...]`.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import itertools
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from decimal import Decimal
from fractions import Fraction

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes long
    from collections.abc import Callable
    from typing import Any, Protocol

    Each = Callable[[Any], object]
    """Writes or reads a part of a value."""

    class ObjectTable(Protocol):
        """Table of the objects that cross as references."""

        def encode(self, value: object) -> list[object]: ...

        def decode(self, number: int) -> object: ...


MAX_DEPTH = 200
MAX_ITERATOR_ITEMS = 100_000
"""Maximum number of items of a transferred iterator; an infinite one is truncated."""

FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, set, dict)}
"""Default factories of transferred defaultdicts; one with any other factory is transferred without it."""


class NotPlain(ValueError):
    """The text of the other side is not a value, or the value is nested too deeply."""


class References:
    """Objects of this side that the other side has a number for."""

    def __init__(self) -> None:
        self.objects: list[object] = []
        self._numbers: dict[int, int] = {}

    def number_of(self, value: object) -> int:
        """Return an object's number: the same every time."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._numbers[id(value)]

    def encode(self, value: object) -> list[object]:
        return ["ref", self.number_of(value)]

    def decode(self, number: int) -> object:
        if not 0 <= number < len(self.objects):
            raise NotPlain(f"there is no object {number}")
        return self.objects[number]


def encode(value: Any, references: ObjectTable, depth: int = 0) -> object:
    """Return a value as what `json.dumps` takes. Subclasses of plain types cross as the plain type."""
    if value is None or value is True or value is False:
        return value
    if depth > MAX_DEPTH:
        raise NotPlain(f"nested more than {MAX_DEPTH} deep")
    kind = type(value)
    if kind is not str and kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), references, depth + 1)
    for plain, write in _WRITERS:
        if isinstance(value, plain):
            return write(value, lambda part: encode(part, references, depth + 1))
    if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
        return ["type", value.__name__]
    return references.encode(value)


def decode(data: Any, references: ObjectTable) -> Any:
    """Return the value that `encode` was given. Raises NotPlain for anything that `encode` does not write."""
    if data is None or isinstance(data, bool | int | float | str):
        return data
    try:
        tag, *parts = data
        if tag == "ref":
            return references.decode(*parts)
        return _READERS[tag](lambda part: decode(part, references), *parts)
    except NotPlain:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as failure:
        raise NotPlain(f"not a value: {str(data)[:200]}") from failure


def _int(value: int, each: Each) -> object:
    number = int.__pos__(value)
    return number if abs(number) < 1 << 63 else ["int", hex(number)]


def _sequence(tag: str) -> Any:
    return lambda value, each: [tag, [each(item) for item in value]]


def _pairs(tag: str) -> Any:
    return lambda value, each: [tag, [[each(key), each(item)] for key, item in dict.items(value)]]


def _defaultdict(value: Any, each: Each) -> list[Any]:
    names = [name for name, kind in FACTORIES.items() if kind is value.default_factory]
    return [*_pairs("defaultdict")(value, each), names[0] if names else None]


_WRITERS: list[tuple[type, Callable[[Any, Each], Any]]] = [
    (str, lambda value, each: str.__str__(value)),
    (int, _int),
    (float, lambda value, each: float.__pos__(value)),
    (complex, lambda value, each: ["complex", value.real, value.imag]),
    (list, _sequence("list")),
    (tuple, _sequence("tuple")),
    (collections.Counter, _pairs("Counter")),
    (collections.defaultdict, _defaultdict),
    (collections.OrderedDict, _pairs("OrderedDict")),
    (dict, _pairs("dict")),
    (set, _sequence("set")),
    (frozenset, _sequence("frozenset")),
    (bytes, lambda value, each: ["bytes", value.decode("latin-1")]),
    (bytearray, lambda value, each: ["bytearray", value.decode("latin-1")]),
    (collections.deque, lambda value, each: ["deque", [each(item) for item in value], value.maxlen]),
    (range, lambda value, each: ["range", each(value.start), each(value.stop), each(value.step)]),
    (slice, lambda value, each: ["slice", each(value.start), each(value.stop), each(value.step)]),
    (Decimal, lambda value, each: ["Decimal", str(value)]),
    (Fraction, lambda value, each: ["Fraction", each(value.numerator), each(value.denominator)]),
    (datetime.datetime, lambda value, each: ["datetime", value.isoformat()]),
    (datetime.date, lambda value, each: ["date", value.isoformat()]),
    (datetime.time, lambda value, each: ["time", value.isoformat()]),
    (datetime.timedelta, lambda value, each: ["timedelta", value.days, value.seconds, value.microseconds]),
    (type(Ellipsis), lambda value, each: ["Ellipsis"]),
    (KeysView, _sequence("keys")),
    (ItemsView, _sequence("items")),
    (ValuesView, _sequence("values")),
    (Iterator, lambda value, each: ["iterator", [each(item) for item in itertools.islice(value, MAX_ITERATOR_ITEMS)]]),
]
"""Writers by type, a subclass before its base."""


def _read_pairs(make: Callable[[dict[object, object]], object]) -> Any:
    return lambda each, pairs: make({each(key): each(item) for key, item in pairs})


def _read_type(each: Each, name: str) -> type:
    kind = getattr(builtins, name)
    if not isinstance(kind, type):
        raise NotPlain(f"{name} is not a type")
    return kind


_READERS: dict[str, Callable[..., Any]] = {
    "int": lambda each, text: int(text, 16),
    "complex": lambda each, real, imag: complex(real, imag),
    "list": lambda each, items: [each(item) for item in items],
    "tuple": lambda each, items: tuple(each(item) for item in items),
    "Counter": _read_pairs(collections.Counter),
    "defaultdict": lambda each, pairs, factory: collections.defaultdict(
        FACTORIES.get(factory), ((each(key), each(item)) for key, item in pairs)
    ),
    "OrderedDict": _read_pairs(collections.OrderedDict),
    "dict": _read_pairs(dict),
    "set": lambda each, items: {each(item) for item in items},
    "frozenset": lambda each, items: frozenset(each(item) for item in items),
    "bytes": lambda each, text: text.encode("latin-1"),
    "bytearray": lambda each, text: bytearray(text.encode("latin-1")),
    "deque": lambda each, items, length: collections.deque((each(item) for item in items), length),
    "range": lambda each, start, stop, step: range(each(start), each(stop), each(step)),
    "slice": lambda each, start, stop, step: slice(each(start), each(stop), each(step)),
    "Decimal": lambda each, text: Decimal(text),
    "Fraction": lambda each, top, bottom: Fraction(each(top), each(bottom)),
    "datetime": lambda each, text: datetime.datetime.fromisoformat(text),
    "date": lambda each, text: datetime.date.fromisoformat(text),
    "time": lambda each, text: datetime.time.fromisoformat(text),
    "timedelta": lambda each, days, seconds, microseconds: datetime.timedelta(days, seconds, microseconds),
    "Ellipsis": lambda each: ...,
    "keys": lambda each, items: dict.fromkeys(each(item) for item in items).keys(),
    "items": lambda each, items: dict(each(item) for item in items).items(),
    "values": lambda each, items: dict(enumerate(each(item) for item in items)).values(),
    "iterator": lambda each, items: iter([each(item) for item in items]),
    "type": _read_type,
}


def encode_exception(error: BaseException) -> dict[str, object]:
    """Return the names of its classes, the nearest first, and its text."""
    try:
        text = str(error)
    except Exception as failure:  # an answer's own __str__ may do anything
        text = f"(no text: {type(failure).__name__})"
    return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": text[:1000]}


def decode_exception(names: list[str], text: str) -> BaseException:
    """Return a built-in exception of the nearest name that can be made of a text."""
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            try:
                return kind(text)
            except TypeError:  # UnicodeDecodeError and its like want more than a text
                continue
    return RuntimeError(text)
