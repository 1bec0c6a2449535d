"""The reference page says what the dataclasses say."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.document import read_field_meanings, render_page
from skyrl_train.config.typed import get_registered_sections

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_committed_page_equals_command_output():
    assert DOCUMENT.read_text(encoding="utf-8") == render_page(), (
        "run `python -m skyrl_train.config.document > docs/configuration.md`"
    )


def settings_without_meaning(config_type, name=""):
    hints = get_type_hints(config_type)
    for key, section in get_registered_sections(config_type)[1].items():
        yield from settings_without_meaning(section, f"{name}{key}.")
    for field in fields(config_type):
        if is_dataclass(hints[field.name]):
            yield from settings_without_meaning(hints[field.name], f"{name}{field.name}.")
        elif field.name not in read_field_meanings(config_type):
            yield name + field.name


def test_all_settings_are_documented():
    assert list(settings_without_meaning(SkyRLConfig)) == []
