"""Print the reference page of all settings, generated from the dataclasses.

`python -m skyrl_train.config.document > docs/configuration.md`
"""

import ast
import inspect
import re
import textwrap
from collections import defaultdict
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from skyrl_gym.envs.registration import env_class_of, registry
from skyrl_train.config.base import get_default_values
from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.other_releases import OTHER_RELEASES, REFUSED_CHOICES, Moved, Refusal, Repeated, Unset
from skyrl_train.config.typed import REST, SECTIONS, describe_expectation, get_registered_sections, join

_TYPE_NAMES = {
    "any names and values": "dict",
    "true or false": "bool",
    "a list of": "list of",
    "an int": "int",
    "a number": "number",
}
"""Expectation as written in errors -> in the tables."""
_INTRODUCTION = """\
# Configuration

Set any part of a run, on the command line, in Python or in a file:

```bash
uv run -m skyrl_train.entrypoints.main_base trainer.seed=1 generator.max_turns=3 --cfg job  # print the settings and end
```

`python -m skyrl_train.config.document > docs/configuration.md` generates this page from `skyrl_train/config`.

- Hydra parses the command line: lists are `'data.train_data=[a.parquet,b.parquet]'`, new entries of a dict
  `+generator.engine_init_kwargs.name=value`, and `~` (the home folder) needs quotes: `"trainer.run_dir='~/run'"`.
- In Python: `SkyRLConfig(trainer=TrainerConfig(seed=1))`, or `SkyRLConfig.from_dict({"trainer": {"seed": 1}})`.
- A default such as `${trainer.seed}` is the value of that setting.
- An unknown name, a value of the wrong type or a contradiction is an error before anything starts.
- In a YAML file on top of the defaults (`--config-dir FOLDER --config-name NAME`):

    ```yaml
    defaults: [ppo_base_config, _self_]
    trainer:
      seed: 1
    ```
"""


def render_page() -> str:
    """Return the text of the page."""
    sections = _render_sections(SkyRLConfig, "", get_default_values(SkyRLConfig), {}, {})
    return "\n".join([_INTRODUCTION, *sections, *_list_environments(), _render_other_releases()])


def _list_environments() -> list[str]:
    """Return the sections of the environments that skyrl_gym ships."""
    sections: list[str] = []
    rendered: dict[type, str] = {}
    for env_id, env_spec in sorted(registry.items()):
        config_class = getattr(env_class_of(env_spec), "config_class", None)
        if str(env_spec.entry_point).startswith("skyrl_gym.") and config_class is not None:
            name = f"environment.skyrl_gym.{env_id}"
            sections += _render_sections(config_class, name, asdict(config_class()), {}, rendered)
    return sections


def _render_sections(
    config_type: type, name: str, defaults: dict[str, Any], described: dict[str, str], rendered: dict[type, str]
) -> list[str]:
    """Render the tables of one dataclass and of the dataclasses nested in it.

    Args:
        described: meanings already on the page -> the setting with that meaning, to which later ones refer.
        rendered: dataclasses already on the page -> the section of each; a later section lists its defaults alone.
    """
    first_section = rendered.setdefault(config_type, name)
    is_repeated = first_section != name
    own, inner = [], []
    hints = get_type_hints(config_type, include_extras=True)
    meanings = read_field_meanings(config_type)
    for field in fields(config_type):
        full_name = join(name, field.name)
        if SECTIONS in field.metadata:
            for key, section in get_registered_sections(config_type)[1].items():
                inner += _render_sections(section, join(name, key), defaults[key], described, rendered)
        elif field.metadata == REST:
            own.append(_render_row(f"{name}.<env_class>", _name_type(hints[field.name]), "", meanings[field.name]))
        elif is_dataclass(hints[field.name]):
            inner += _render_sections(hints[field.name], full_name, defaults[field.name], described, rendered)
        elif is_repeated:
            own.append(f"| `{full_name}` | `{_format_default(defaults[field.name])}` |")
        else:
            first = described.setdefault(meanings[field.name], full_name)
            is_short = len(meanings[field.name]) < len(first) + 10
            meaning = meanings[field.name] if first == full_name or is_short else f"see `{first}`"
            default = _format_default(defaults[field.name])
            own.append(_render_row(full_name, _name_type(hints[field.name]), default, meaning))
    if not own:
        return inner
    about = f"As `{first_section}`." if is_repeated else _to_one_line(inspect.getdoc(config_type) or "")
    head = (
        "| setting | default |\n|---|---|\n"
        if is_repeated
        else "| setting | value | default | meaning |\n|---|---|---|---|\n"
    )
    return [f"## {name}\n\n{about}\n\n{head}" + "\n".join(own) + "\n", *inner]


def _name_type(hint: object) -> str:
    """Describe the accepted values in the words of the tables."""
    text = describe_expectation(hint)
    for phrase, short in _TYPE_NAMES.items():
        text = re.sub(rf"\b{phrase}\b", short, text)
    return re.sub(r"^(one of .+) or list of \1", r"\1, or a list of these", text)


@cache
def read_field_meanings(config_type: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, including inherited fields."""
    meanings: dict[str, str] = {}
    for owner in reversed(config_type.__mro__):
        if not is_dataclass(owner):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                meanings[statement.target.id] = _to_one_line(str(following.value.value))
    return meanings


def _render_other_releases() -> str:
    """Render the tables of settings of other releases that are unsupported, renamed or unset here."""
    refused = {name: each for name, each in OTHER_RELEASES.items() if isinstance(each, Refusal)}
    moved = {name: each for name, each in OTHER_RELEASES.items() if isinstance(each, Moved)}
    same = [name for name, each in moved.items() if each == Moved(name.replace(".inference_engine.", "."))]
    repeated = {name: each for name, each in OTHER_RELEASES.items() if isinstance(each, Repeated)}
    unset = {name: each for name, each in OTHER_RELEASES.items() if isinstance(each, Unset)}
    groups: dict[str, list[str]] = defaultdict(list)
    for name, each in refused.items():
        if not _is_refused_for_policy(name, each):
            groups[each.reason].append(f"`{name}`{_describe_accepted(each)}")
    lines = [
        "## Settings of other releases",
        "",
        "Names from other SkyRL releases, DeepSpeed or Megatron. Some set a setting of another name here:",
        "",
        "| there | here |",
        "|---|---|",
        *(
            f"| `{name}` | `{each.setting}`{_describe_changed_values(each)} |"
            for name, each in moved.items()
            if name not in same
        ),
        *(f"| `{name}` | null, or as `{each.setting}`: {each.reason} |" for name, each in repeated.items()),
        "",
        "`generator.inference_engine.NAME` is `generator.NAME` for "
        + ", ".join(f"`{name.rpartition('.')[2]}`" for name in same)
        + ".",
        "",
        "Values that mean the default here: "
        + ", ".join(f"`{name}={_format_default(value)}`" for name, each in unset.items() for value in each.values)
        + ".",
        "",
        "The others are refused, except for the values in parentheses, which ask for what is done anyway. Rows of "
        "`trainer.policy` hold for `trainer.critic` and `trainer.ref`, of `deepspeed_config.train` for "
        "`deepspeed_config.eval`, of `generator` for `generator.inference_engine`.",
        "",
        "| refused (except for) | reason |",
        "|---|---|",
        *(f"| {', '.join(names)} | {reason} |" for reason, names in groups.items()),
    ]
    for name, choices in REFUSED_CHOICES.items():
        lines += [f"| `{name}={choice}` | {reason} |" for choice, reason in choices.items()]
    return "\n".join(lines) + "\n"


def _is_refused_for_policy(name: str, refusal: Refusal) -> bool:
    """Check whether a setting of critic or reference is listed with the policy."""
    owner = re.match(r"trainer\.(critic|ref)\.", name)
    return bool(owner) and OTHER_RELEASES.get(f"trainer.policy.{name[owner.end() :]}") == refusal


def _describe_changed_values(moved: Moved) -> str:
    """Describe the values that differ."""
    changed = [f"`{_format_default(there)}` is `{_format_default(here)}`" for there, here in moved.values]
    ignored = [f"`{_format_default(value)}` changes nothing" for value in moved.accepted]
    return "".join(f"; {text}" for text in (*changed, *ignored))


def _describe_accepted(refusal: Refusal) -> str:
    """List the accepted values in parentheses."""
    if refusal.accepted is None:
        return " (any)"
    warned = (
        ["any other with a warning"]
        if refusal.warned is None
        else [f"`{_format_default(value)}` with a warning" for value in refusal.warned]
    )
    accepted = [*(f"`{_format_default(value)}`" for value in refusal.accepted), *warned]
    return f" ({', '.join(accepted)})" if accepted else ""


def _render_row(name: str, expected: str, default: str, meaning: str) -> str:
    cells = [f"`{name}`", expected, f"`{default}`" if default else "", meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _format_default(value: object) -> str:
    """Format a default as in YAML or on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, list):
        return "[" + ", ".join(_format_default(item) for item in value) + "]"
    return str(value)


def _to_one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    print(render_page(), end="")
