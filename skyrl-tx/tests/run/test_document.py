"""The page of settings is the code's."""

from pathlib import Path

from tx.run.document import render_page
from tx.tinker.config import EngineConfig

DOCUMENT = Path(__file__).parents[3] / "docs" / "tinker-settings.md"


def test_settings_document_matches_code():
    assert DOCUMENT.read_text() == render_page(), "run `python -m tx.run.document > docs/tinker-settings.md`"


def test_every_setting_has_description():
    rows = [line for line in render_page().splitlines() if line.startswith("| `")]
    assert all(row.split(" | ")[-1].strip(" |") for row in rows)
    assert len(rows) > len(EngineConfig.model_fields) + 8
