"""Banned phrases: wording that `docs/glossary.md` and the standard terms of the field have replaced."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ["skyrl-gym/skyrl_gym", "skyrl-train/skyrl_train", "skyrl-agent/skyrl_agent", "skyrl-tx/tx"]
PHRASES = {  # in docstrings, comments, messages and documentation -> use
    r"for the sake": "for",
    r"at hand": "available; current",
    r"mend(s|ed|ing)?": "fix",
    r"told apart": "distinguished",
    r"lets? go of": "releases",
    r"what became of": "outcome",
    r"in doubt": "unconfirmed",
    r"culprits": "cause",
    r"doom(ed)?": "failing",
    r"aftermath": "consequences",
    r"whereof|whereupon|thereof|heretofore": "plain words",
}
NAMES = {  # of classes, functions, arguments and variables -> use
    r"(Aftermath|Caretaker|Doom\w*|Sleeper|Traveller|Pulse|Settling|Suspects|Peers)": "a noun of the field",
    r"(abandon|bring_back|dice|joined|kept|let_go|made|recall|said|settle|take_off|what_is_late)": "a verb",
    r"(in_place_of_\w+|told_apart|in_doubt|filler|lacks)": "a term of the glossary",
}
PHRASE = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)
NAME = re.compile(rf"\b(?:class|def) _*(?:{'|'.join(NAMES)})\b")


def find_banned(text: str) -> list[str]:
    """Return `line: phrase` of each banned phrase or name."""
    return [
        f"{number}: {match[0]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern in (PHRASE, NAME)
        for match in pattern.finditer(line)
    ]


@pytest.mark.parametrize("folder", [*SOURCES, "docs"])
def test_texts_contain_no_banned_phrase(folder: str):
    paths = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".md")]
    found = [f"{path.relative_to(ROOT)}:{place}" for path in paths for place in find_banned(path.read_text("utf-8"))]
    assert found == []


def test_banned_phrases_and_names_are_detected():
    source = 'class Sleeper: ...\ndef _kept(x):\n    """Mended."""\nunkept = recommended'
    assert find_banned(source) == ["1: class Sleeper", "2: def _kept", "3: Mended"]
