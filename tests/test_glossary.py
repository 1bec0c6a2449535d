"""Names that the glossary has replaced stay away: metaphors, relative phrases, participles for what a function does."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["skyrl-gym/skyrl_gym", "skyrl-train/skyrl_train", "skyrl-agent/skyrl_agent", "skyrl-tx/tx"]
CLASSES = frozenset(
    re.findall(
        r"\w+",
        """Aftermath Answer Answering Ask Broken Caretaker Desk Doom DoomedFolderRow FinishedTokens Framing Grant Judged
        Learnt Life Live Member Orders Patience Peers
        Pulse Settling Sleeper Slots Steps Suspects Traveller Waiter Want World""",
    )
)
FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        """abandon add_given add_written bring bring_back cut dice each found full given in_place_of_policy
        joined joint_pass kept learn let_go made recall said settle shown take_off tell told_apart what_is_late""",
    )
)
ANYWHERE = frozenset(["company", "culprits", "doom", "filler", "in_doubt", "lacks", "told_apart"])


def forbidden_names(source: str) -> list[str]:
    """Return `line name` of classes, functions, arguments, attributes and variables that the glossary has replaced."""
    places = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            name, forbidden = node.name.strip("_"), CLASSES | ANYWHERE
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, forbidden = node.name.strip("_"), FUNCTIONS | ANYWHERE
        elif isinstance(node, ast.arg | ast.Attribute | ast.Name):
            full_name = {ast.arg: "arg", ast.Attribute: "attr", ast.Name: "id"}[type(node)]
            name, forbidden = getattr(node, full_name).strip("_"), ANYWHERE
        else:
            continue
        if name in forbidden:
            places.append(f"{node.lineno} {name}")
    return places


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_no_name_that_the_glossary_replaced(package):
    places = [
        f"{path.relative_to(ROOT)}:{place}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if not re.search(r"_pb2\.py$", path.name)
        for place in forbidden_names(path.read_text())
    ]
    assert places == []


def test_forbidden_names_are_found():
    source = "class Answer:\n    def _cut(self, filler): self.doom = filler\ncut = 3\n"
    assert sorted(forbidden_names(source)) == ["1 Answer", "2 cut", "2 doom", "2 filler", "2 filler"]
