"""Print the reference page of task files, generated from the classes that hold their keys.

`python -m skyrl_agent.config.document > docs/agent-settings.md`
"""

import types
from collections.abc import Iterator
from typing import Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from skyrl_agent.config.task_file import Section, TaskFile

_INTRODUCTION = """\
# Task files

Describe an agent, its task and its tools in a YAML file, and check the file ([agents](agents.md) has examples):

```bash
uv run examples/agent/swe/swe_dataset.py --output_dir ~/data/agent_swe
uv run -m skyrl_agent.validate examples/agent/swe/swe_tiny.yaml ~/data/agent_swe/train.parquet
```

An unknown key or a wrong value is an error before anything starts. `extends: FILE` takes all keys that a file does not
have from another one. `python -m skyrl_agent.config.document > docs/agent-settings.md` generates this page.
"""


def page() -> str:
    """Render the page. A meaning that several keys have is written once."""
    first: dict[str, str] = {}
    rows = []
    for name, default, meaning in keys(TaskFile):
        described = first.setdefault(meaning, name)
        rows.append(f"| `{name}` | {default} | {meaning if described == name else f'see `{described}`'} |")
    return f"{_INTRODUCTION}\n| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """List (dotted name, default, meaning) of each key, with sections expanded."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            meaning = " ".join((field.description or "").split()).rstrip(".")
            values = _format_choices(field.annotation)
            yield f"{prefix}{name}", _format_default(field), _format_cell(f"{values}{meaning}")


def _format_choices(hint: object) -> str:
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    values = [value for arm in arms if get_origin(arm) is Literal for value in get_args(arm) if value]
    return f"{', '.join(f'`{value}`' for value in values)}. " if values else ""


def _format_default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return "" if value in (None, [], {}) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _format_cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
