"""Print the reference page of the server's settings, generated from the classes that hold them.

`python -m tx.run.document > docs/tinker-settings.md`
"""

import inspect
import re
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from pydantic_core import PydanticUndefined

from skyrl_train.config import GeneratorConfig
from skyrl_train.config.document import read_field_meanings
from tx.tinker.backends.build import SAMPLING_SETTINGS
from tx.tinker.backends.skyrl_train.settings import (
    GENERATOR_SETTINGS,
    TRAINING_SETTINGS,
    SkyRLTrainSettings,
    get_setting_names,
)
from tx.tinker.backends.torch.sampling import NativeSampling
from tx.tinker.backends.torch.settings import TrainingSettings
from tx.tinker.command_line import ENV_PREFIX
from tx.tinker.config import EngineConfig

_INTRODUCTION = f"""\
# Settings of the Tinker-compatible server

This page is made from the code by `python -m tx.run.document > docs/tinker-settings.md`; change it there. What the
server is: [tinker.md](tinker.md).

An option of the command line counts before the environment, which counts before the default. An unknown option, setting
or value is an error that names it, before anything starts; `tx doctor` with the same options looks at the rest of the
machine.

## Options

Of `python -m tx.tinker.api` and `tx serve`. In the environment: `{ENV_PREFIX}` and the name in capitals (`--port` is
`{ENV_PREFIX}PORT`); lists with commas, objects as JSON.
"""
_BACKEND = """\
## `--backend-config` of the backend `torch`

A JSON object: `--backend-config '{"device": "cuda:1", "max_num_seqs": 512}'`.
"""
_ENGINES = """\
## `--backend-config` of the backend `skyrl_train`

A JSON object: `--backend-config '{"num_processes": 4, "generator.num_inference_engines": 4}'`. Those of `generator.`
are skyrl_train's ([configuration.md](configuration.md)).
"""


def render_page() -> str:
    """Return the Markdown text of the page."""
    options = [
        _render_row(
            "--" + name.replace("_", "-"),
            _render_default(field.get_default(call_default_factory=True)),
            field.description,
        )
        for name, field in EngineConfig.model_fields.items()
    ]
    meanings = read_field_meanings(TrainingSettings)
    training = [
        _render_row(field.name, _render_default(field.default), meanings[field.name])
        for field in fields(TrainingSettings)
    ]
    parameters = inspect.signature(NativeSampling).parameters
    sampling = [
        _render_row(name, _render_default(parameters[name].default), meaning)
        for name, meaning in _parse_argument_meanings(NativeSampling).items()
        if name in SAMPLING_SETTINGS
    ]
    return "\n".join(
        [
            _INTRODUCTION,
            _render_table("option", options),
            _BACKEND,
            _render_table("setting", [*training, *sampling]),
            _ENGINES,
            _render_table("setting", [*_describe_ray(), *_describe_engines()]),
        ]
    )


def _describe_ray() -> list[str]:
    own, training = read_field_meanings(SkyRLTrainSettings), read_field_meanings(TrainingSettings)
    rows = [
        _render_row(field.name, _render_default(field.default), own[field.name])
        for field in fields(SkyRLTrainSettings)
        if field.name in get_setting_names()
    ]
    defaults = TrainingSettings()
    return rows + [
        _render_row(name, _render_default(getattr(defaults, name)), training[name]) for name in TRAINING_SETTINGS
    ]


def _describe_engines() -> list[str]:
    meanings = read_field_meanings(GeneratorConfig)
    defaults = asdict(GeneratorConfig()) | {"backend": "vllm", "model_dtype": None, "remote_inference_engine_urls": []}
    return [
        _render_row(f"generator.{name}", _render_default(defaults[name]), meanings[name]) for name in GENERATOR_SETTINGS
    ]


def _parse_argument_meanings(documented: type) -> dict[str, str]:
    """Read the `Args:` section of a docstring."""
    text = (inspect.getdoc(documented) or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", text, re.DOTALL | re.MULTILINE)
    return {name: meaning[0].upper() + meaning[1:] for name, meaning in found}


def _render_table(head: str, rows: Iterable[str]) -> str:
    return f"| {head} | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _render_row(name: str, default: str, meaning: str | None) -> str:
    cells = [f"`{name}`", default, " ".join((meaning or "").split()).rstrip(".")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _render_default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    return "" if value in (None, [], {}) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(render_page(), end="")
