"""Constraints of answers: a JSON schema or a grammar that a whole answer satisfies. Engine-neutral; imports no engine
and no library of grammars.

    {"json_schema": {…}}    a JSON value (https://json-schema.org); `{"type": "object"}` for any object
    {"lark": "start: …"}    a grammar in llguidance's Lark (https://github.com/guidance-ai/llguidance, docs/syntax.md)
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MAX_CHARACTERS = 100_000
"""Characters of a constraint. Compilation of a schema of this size takes about a second."""

MAX_DEPTH = 64
"""Levels of objects and arrays of a schema."""

WHITESPACE = r"[\x20\n\t]{0,32}"
"""White space between the tokens of JSON, of which several may follow each other: the native engine bounds it
(`native/constrained.py`), since models, small ones above all, write it without end."""


class ConstraintFailed(ValueError):
    """A constraint that became too complex within an answer, or that no token of the vocabulary continues; the answer
    alone fails."""


@dataclass(frozen=True)
class Constraint:
    """Constraint of one answer, checked in form and size. `text` is JSON or Lark."""

    kind: Literal["json_schema", "lark"]
    text: str

    @classmethod
    def of(cls, given: object) -> "Constraint":
        """Read `{"json_schema": schema}` or `{"lark": grammar}`.

        Raises:
            ValueError: another form, or too large.
        """
        if isinstance(given, Constraint):
            return given
        if not isinstance(given, Mapping) or len(given) != 1 or not set(given) <= {"json_schema", "lark"}:
            raise ValueError(
                "sampling parameter constraint must be {'json_schema': an object or a JSON text} or {'lark': a text}; "
                f"got {str(given)[:100]!r}"
            )
        [(kind, value)] = given.items()
        text = value if isinstance(value, str) else _schema_text(value)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"sampling parameter constraint must have at most {MAX_CHARACTERS} characters; the {kind} has "
                f"{len(text)}. Simplify it"
            )
        return cls("lark" if kind == "lark" else "json_schema", text)

    def as_keyword(self) -> dict[str, str]:
        """Return the form that `of` reads."""
        return {self.kind: self.text}

    def bounded_schema(self) -> str:
        """Return the schema with the bound on white space, for libraries that read it there (llguidance).

        Raises:
            ValueError: the text is no JSON object.
        """
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the constraint is no JSON schema: {error}") from error
        return json.dumps(with_bounded_space(schema))


def with_bounded_space(schema: object) -> dict[str, object]:
    """Return a JSON schema with the bound on white space among llguidance's options, which stand in the schema.

    Raises:
        ValueError: it is no object.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema must be an object; got {str(schema)[:100]!r}")
    options = schema.get("x-guidance")
    own = dict(options) if isinstance(options, Mapping) else {}
    return {**schema, "x-guidance": own | {"whitespace_pattern": WHITESPACE}}


def _schema_text(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema must be an object; got {schema!r}")
    if _is_deeper(schema, MAX_DEPTH):
        raise ValueError(f"a JSON schema may nest objects and arrays {MAX_DEPTH} levels deep; this one is deeper")
    return json.dumps(schema)


def _is_deeper(value: object, limit: int) -> bool:
    """Check whether objects and arrays nest deeper than `limit`: by level, as recursion would end at such a value."""
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
