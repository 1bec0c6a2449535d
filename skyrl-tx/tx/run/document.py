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

Set any part of the [server](tinker.md), and check the settings and the machine before a start:

```bash
uv run tx doctor --base-model Qwen/Qwen3-0.6B --max-models-per-tenant 4
```

`python -m tx.run.document > docs/tinker-settings.md` generates this page from the code. The command line takes
precedence over the environment. An unknown option, setting or value is an error before anything starts.

## Options

Of `tx serve` and `python -m tx.tinker.api`. In the environment: `{ENV_PREFIX}` and the name in capitals (`--port` is
`{ENV_PREFIX}PORT`); lists with commas, objects as JSON.
"""
_BACKEND = """\
## `--backend-config` of the backend `torch`

A JSON object: `--backend-config '{"device": "cuda:1", "max_num_seqs": 512}'`.
"""
_ENGINES = """\
## `--backend-config` of the backend `skyrl_train`

A JSON object: `--backend-config '{"num_processes": 4, "generator.num_inference_engines": 4}'`.
"""
_GENERATOR = """\
Settings of the engines, described in [configuration.md](configuration.md#generator.backend):
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
            _render_table("setting", _describe_ray()),
            _GENERATOR,
            "| setting | default |\n|---|---|\n" + "\n".join(_list_engine_defaults()) + "\n",
        ]
    )


def _describe_ray() -> list[str]:
    """Render the rows of the backend on Ray; settings of the backend `torch` refer to its table."""
    own = read_field_meanings(SkyRLTrainSettings)
    rows = [
        _render_row(field.name, _render_default(field.default), own[field.name])
        for field in fields(SkyRLTrainSettings)
        if field.name in get_setting_names()
    ]
    defaults = TrainingSettings()
    return rows + [
        _render_row(name, _render_default(getattr(defaults, name)), "as above") for name in TRAINING_SETTINGS
    ]


def _list_engine_defaults() -> list[str]:
    defaults = asdict(GeneratorConfig()) | {"backend": "vllm", "model_dtype": None, "remote_inference_engine_urls": []}
    return [f"| `generator.{name}` | {_render_default(defaults[name]) or '`null`'} |" for name in GENERATOR_SETTINGS]


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
