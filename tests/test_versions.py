"""INSTALL.md names the releases of libraries that the packages require."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?:Python|`([\w-]+)`) \| `([^`]+)` \| ([\d.]+)[^|]*\| ([\d.]*) ?\|$", re.MULTILINE)


def read_requirements() -> dict[str, SpecifierSet]:
    """Return the required releases by library, those of extras too; Python's under an empty name."""
    project = tomllib.loads((ROOT / "skyrl-train" / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    requirements = {requirement.name: requirement.specifier for requirement in map(Requirement, texts)}
    return requirements | {"": SpecifierSet(project["requires-python"])}


def test_table_of_versions_equals_requirements():
    rows = ROW.findall((ROOT / "INSTALL.md").read_text())
    assert {"", "torch", "transformers", "ray", "vllm", "sglang"} <= {name for name, *_ in rows}
    requirements = read_requirements()
    for name, supported, *tested in rows:
        assert SpecifierSet(supported) == requirements[name], name
        for version in filter(None, tested):
            # A release line, such as 0.21, is in the range if its first release is.
            assert Version(version) in requirements[name], name
