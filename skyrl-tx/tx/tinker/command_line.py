"""Command line and environment, generated from the fields of `EngineConfig`. Command line takes precedence over
environment (`TX_` and the field's name), and that over defaults. Unknown options are refused with the nearest name.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from skyrl_gym.suggestions import did_you_mean
from tx.errors import ConfigError
from tx.tinker.config import EngineConfig

ENV_PREFIX = "TX_"
_FIELDS = EngineConfig.model_fields


def read_config(argv: Sequence[str], env: Mapping[str, str] | None = None) -> EngineConfig:
    """Read the settings of a server.

    Args:
        argv: without the program's name
        env: `os.environ` if omitted

    Raises:
        ConfigError: an unknown option or a wrong value, by its option's name.
        SystemExit: after `--help`.
    """
    given, unknown = _build_parser().parse_known_args(list(argv))
    if unknown:
        raise ConfigError(_describe_unknown_option(unknown[0]))
    from_env = dict(_read_values(os.environ if env is None else env))
    sources = {name: f"{ENV_PREFIX}{name.upper()}" for name in from_env} | {
        name: _add_option(name) for name in vars(given)
    }
    try:
        return EngineConfig(**from_env | vars(given))
    except ValidationError as error:
        raise ConfigError("; ".join(_describe_error(problem, sources) for problem in error.errors())) from None


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tx.tinker.api",
        description="A training service with the API of the tinker SDK. Each option can also be set as an "
        f"environment variable: {ENV_PREFIX} and its name in capitals with _ for -.",
        argument_default=argparse.SUPPRESS,  # omit missing options, so that environment variables apply
        allow_abbrev=False,
    )
    for name, field in _FIELDS.items():
        kind: dict[str, Any] = {}
        if field.annotation is bool:
            kind["action"] = argparse.BooleanOptionalAction
        elif _is(field, list):
            kind["action"] = "append"
        elif _is(field, dict):
            kind["type"] = lambda text, name=name: parse_json_object(text, _add_option(name))
        parser.add_argument(_add_option(name), help=_format_help(field), **kind)
    return parser


def _read_values(env: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name, field in _FIELDS.items():
        variable = f"{ENV_PREFIX}{name.upper()}"
        text = env.get(variable)
        if text is None:
            continue
        if field.annotation is bool:
            if text not in ("0", "1"):
                raise ConfigError(f"{variable} must be 0 or 1; got {text!r}")
            yield name, text == "1"
        elif _is(field, list):
            yield name, [part.strip() for part in text.split(",") if part.strip()]
        elif _is(field, dict):
            yield name, parse_json_object(text, variable)
        else:
            yield name, text


def _add_option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is(field: FieldInfo, kind: type) -> bool:
    return get_origin(field.annotation) is kind


def _format_help(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    if field.default in (None, "") or field.is_required() or field.default_factory is not None:
        return text.replace("%", "%%")
    return f"{text} Default {field.default}.".replace("%", "%%")


def parse_json_object(text: str, source: str) -> dict[str, Any]:
    """Read a JSON object that was given as `source`. Raises: ConfigError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} must be a JSON object; got {text[:200]!r}, which is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"""{source} must be a JSON object such as '{{"key": 1}}'; got {text[:200]!r}""")
    return value


def _describe_unknown_option(text: str) -> str:
    if not text.startswith("-"):
        return f"unexpected argument {text!r}; pass settings as --name value"
    name = text.split("=", 1)[0]
    hint = did_you_mean(name, map(_add_option, _FIELDS), otherwise="--help lists all options")
    return f"unknown option {name}; {hint}"


def _describe_error(problem: Any, sources: Mapping[str, str]) -> str:
    name = str(problem["loc"][0])
    if problem["type"] == "missing":
        return f"{_add_option(name)} is required"
    rule = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{sources.get(name, _add_option(name))}: {rule}; got {problem['input']!r}"
