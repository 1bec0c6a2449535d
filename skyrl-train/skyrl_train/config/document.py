"""Print the reference page of all settings, generated from the dataclasses.

`python -m skyrl_train.config.document > docs/configuration.md`
"""

import ast
import inspect
import textwrap
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from skyrl_gym.envs.registration import env_class_of, registry
from skyrl_train.config.base import get_default_values
from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.other_releases import OTHER_RELEASES, REFUSED_CHOICES, Moved, Refusal, Repeated, Unset
from skyrl_train.config.typed import REST, SECTIONS, describe_expectation, get_registered_sections, join

_INTRODUCTION = """\
# Configuration

Every setting of a run. This page is made from `skyrl_train/config` and the registered losses by
`python -m skyrl_train.config.document > docs/configuration.md`; change it there.

- On the command line: `python -m skyrl_train.entrypoints.main_base trainer.seed=1 generator.max_turns=3`. Hydra reads
  it, so lists are `'data.train_data=[a.parquet,b.parquet]'`. `--cfg job` prints the settings and ends.
- New entries of a dict setting: `+generator.engine_init_kwargs.name=value`.
- In Python: `SkyRLConfig(trainer=TrainerConfig(seed=1))`, or `SkyRLConfig.from_dict({"trainer": {"seed": 1}})`.
- A default such as `${trainer.seed}` is the value of that setting.
- `~` at the start of a path is the home folder; on the command line Hydra wants quotes: `"trainer.run_dir='~/run'"`.
- A name that does not exist, a value of the wrong type or a contradiction is an error before anything starts.
- In a YAML file on top of the defaults (`--config-dir FOLDER --config-name NAME`):

    ```yaml
    defaults: [ppo_base_config, _self_]
    trainer:
      seed: 1
    ```
"""


def render_page() -> str:
    """Return the text of the page."""
    sections = _render_sections(SkyRLConfig, "", get_default_values(SkyRLConfig), {})
    return "\n".join([_INTRODUCTION, *sections, *_list_environments(), _render_other_releases()])


def _list_environments() -> list[str]:
    """Return the sections of the environments that skyrl_gym ships."""
    sections = []
    for env_id, env_spec in sorted(registry.items()):
        config_class = getattr(env_class_of(env_spec), "config_class", None)
        if str(env_spec.entry_point).startswith("skyrl_gym.") and config_class is not None:
            sections += _render_sections(config_class, f"environment.skyrl_gym.{env_id}", asdict(config_class()), {})
    return sections


def _render_sections(config_type: type, name: str, defaults: dict[str, Any], described: dict[str, str]) -> list[str]:
    """Render the tables of one dataclass and of the dataclasses nested in it.

    Args:
        described: meanings already on the page -> the setting with that meaning, to which later ones refer.
    """
    own, inner = [], []
    hints = get_type_hints(config_type, include_extras=True)
    meanings = read_field_meanings(config_type)
    for field in fields(config_type):
        full_name = join(name, field.name)
        if SECTIONS in field.metadata:
            for key, section in get_registered_sections(config_type)[1].items():
                inner += _render_sections(section, join(name, key), defaults[key], described)
        elif field.metadata == REST:
            own.append(
                _render_row(f"{name}.<env_class>", describe_expectation(hints[field.name]), "", meanings[field.name])
            )
        elif is_dataclass(hints[field.name]):
            inner += _render_sections(hints[field.name], full_name, defaults[field.name], described)
        else:
            first = described.setdefault(meanings[field.name], full_name)
            is_short = len(meanings[field.name]) < len(first) + 10
            meaning = meanings[field.name] if first == full_name or is_short else f"see `{first}`"
            own.append(
                _render_row(
                    full_name, describe_expectation(hints[field.name]), _format_default(defaults[field.name]), meaning
                )
            )
    if not own:
        return inner
    head = (
        f"## {name}\n\n{_to_one_line(inspect.getdoc(config_type) or '')}\n\n| setting | value | default | meaning |\n"
    )
    return [head + "|---|---|---|---|\n" + "\n".join(own) + "\n", *inner]


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
    repeated = {name: each for name, each in OTHER_RELEASES.items() if isinstance(each, Repeated)}
    unset = {name: each for name, each in OTHER_RELEASES.items() if isinstance(each, Unset)}
    lines = [
        "## Settings of other releases",
        "",
        "Settings known from other SkyRL releases, DeepSpeed or Megatron. Some have another name here and set that "
        "setting; giving both names different values is an error.",
        "",
        "| setting there | setting here |",
        "|---|---|",
        *(f"| `{name}` | `{each.setting}`{_describe_changed_values(each)} |" for name, each in moved.items()),
        *(f"| `{name}` | null, or as `{each.setting}`: {each.reason} |" for name, each in repeated.items()),
        "",
        "These values, known from other releases, mean the default: "
        + ", ".join(f"`{name}={_format_default(value)}`" for name, each in unset.items() for value in each.values)
        + ".",
        "",
        "A value in the second column matches what is done anyway and is accepted; any other value is an error with "
        "the reason. Rows for `trainer.policy.megatron_config` also apply to the critic and the reference model, "
        "rows for `deepspeed_config.train` to `deepspeed_config.eval`, and rows for `generator` to "
        "`generator.inference_engine`.",
        "",
        "| setting or section | accepted | otherwise refused |",
        "|---|---|---|",
        *(f"| `{name}` | {_describe_accepted(each)} | {each.reason} |" for name, each in refused.items()),
        "",
        "| choice | refused |",
        "|---|---|",
    ]
    for name, choices in REFUSED_CHOICES.items():
        lines += [f"| `{name}={choice}` | {reason} |" for choice, reason in choices.items()]
    return "\n".join(lines) + "\n"


def _describe_changed_values(moved: Moved) -> str:
    """Describe the values that differ."""
    changed = [f"`{_format_default(there)}` is `{_format_default(here)}`" for there, here in moved.values]
    ignored = [f"`{_format_default(value)}` changes nothing" for value in moved.accepted]
    return "".join(f"; {text}" for text in (*changed, *ignored))


def _describe_accepted(refusal: Refusal) -> str:
    if refusal.accepted is None:
        return "any"
    warned = (
        ["any other with a warning"]
        if refusal.warned is None
        else [f"`{_format_default(value)}` with a warning" for value in refusal.warned]
    )
    return ", ".join([*(f"`{_format_default(value)}`" for value in refusal.accepted), *warned])


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
