"""Constraints of completions: a JSON schema or a grammar that the entire completion satisfies. Engine-neutral; imports
neither an engine nor a grammar library.

    {"json_schema": {…}}    a JSON value (https://json-schema.org); `{"type": "object"}` for any object
    {"lark": "start: …"}    a grammar in llguidance's Lark (https://github.com/guidance-ai/llguidance, docs/syntax.md)
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MAX_CHARACTERS = 100_000
"""Maximum characters of a constraint. Compilation of a schema of this size takes about a second."""

MAX_DEPTH = 64
"""Maximum nesting of objects and arrays in a schema."""

WHITESPACE = r"[\x20\n\t]{0,32}"
"""White space between JSON tokens. Repeated pieces are bounded by the native engine (`native/constrained.py`), since
models, especially small ones, may generate endless white space.
"""


class ConstraintFailed(ValueError):
    """The constraint became too complex during generation, or no token of the vocabulary can continue. Only this
    request fails.
    """


@dataclass(frozen=True)
class Constraint:
    """Constraint of one completion, with validated form and size. `text` is JSON or Lark."""

    kind: Literal["json_schema", "lark"]
    text: str

    @classmethod
    def parse(cls, given: object) -> "Constraint":
        """Parse `{"json_schema": schema}` or `{"lark": grammar}`.

        Raises:
            ValueError: another form, or too large.
        """
        if isinstance(given, Constraint):
            return given
        if not isinstance(given, Mapping) or len(given) != 1 or not set(given) <= {"json_schema", "lark"}:
            raise ValueError(
                "sampling parameter constraint must be {'json_schema': an object or a JSON text} or {'lark': a "
                f"string}}; got {str(given)[:100]!r}"
            )
        [(kind, value)] = given.items()
        text = value if isinstance(value, str) else _dump_schema(value)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"sampling parameter constraint must have at most {MAX_CHARACTERS} characters; the {kind} has "
                f"{len(text)}. Simplify it"
            )
        return cls("lark" if kind == "lark" else "json_schema", text)

    def to_keyword(self) -> dict[str, str]:
        """Return the form that `parse` reads."""
        return {self.kind: self.text}

    def build_bounded_schema(self) -> str:
        """Return the schema with the bound on white space, for libraries that read the bound from the schema
        (llguidance).

        Raises:
            ValueError: the text is not a JSON object.
        """
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the constraint is not a valid JSON schema: {error}") from error
        return json.dumps(add_whitespace_bound(schema))


def add_whitespace_bound(schema: object) -> dict[str, object]:
    """Add the bound on white space to a JSON schema, as an option of llguidance.

    Raises:
        ValueError: not an object.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema must be an object; got {str(schema)[:100]!r}")
    options = schema.get("x-guidance")
    own = dict(options) if isinstance(options, Mapping) else {}
    return {**schema, "x-guidance": own | {"whitespace_pattern": WHITESPACE}}


def _dump_schema(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema must be an object; got {schema!r}")
    if _is_deeper(schema, MAX_DEPTH):
        raise ValueError(
            f"a JSON schema may nest objects and arrays at most {MAX_DEPTH} levels deep; this one is deeper"
        )
    return json.dumps(schema)


def _is_deeper(value: object, limit: int) -> bool:
    """Return whether objects and arrays nest deeper than `limit`. Iterates by level, since recursion could overflow."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, Mapping) else node)  # pyright: ignore[reportGeneralTypeIssues]
            if isinstance(child, Mapping | list)
        ]
        if not level:
            return False
    return True
