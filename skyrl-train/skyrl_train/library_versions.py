"""Check of the installed libraries against the releases that a package is tested with: its own requirements, which
`pip install --upgrade` or an image with other libraries does not keep to."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PACKAGE = "skyrl-train"

_DIST_INFO = re.compile(r"(.+)-([^-]+)\.dist-info")


@dataclass(frozen=True)
class UntestedLibrary:
    """Installed library of a release outside the tested range."""

    name: str
    version: str
    tested: str
    """Tested range, as a specifier such as `>=2.11,<2.15`."""

    is_too_old: bool
    """The release is below the range: names that are imported do not exist in it."""

    def __str__(self) -> str:
        relation = "older than" if self.is_too_old else "outside of"
        return (
            f"{self.name} {self.version} is {relation} the tested releases ({self.tested}); scripts/setup.sh installs "
            "a tested one (INSTALL.md#versions)"
        )


def find_untested_libraries(requirements: Sequence[str], installed: Mapping[str, str]) -> Iterator[UntestedLibrary]:
    """Yield the installed libraries outside their required ranges. Extras count where their library is installed.

    Args:
        requirements: in the form of package metadata, such as `vllm==0.32.0 ; extra == "vllm"`
        installed: name -> version
    """
    for text in requirements:
        requirement = Requirement(text)
        found = installed.get(canonicalize_name(requirement.name))
        if found is None or requirement.specifier.contains(found, prereleases=True):
            continue
        lowest = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
        # By the numbers alone: an image of NVIDIA has a torch 2.11.0a0, which sorts before 2.11.
        is_too_old = any(Version(found).release < each.release for each in lowest)
        yield UntestedLibrary(requirement.name, found, str(requirement.specifier), is_too_old)


def list_installed() -> dict[str, str]:
    """Return name and version of every installed package.

    Read from the names of their folders: parsing their metadata with `importlib.metadata` takes 200 times as long.
    """
    found: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        if os.path.isdir(folder):
            names = (_DIST_INFO.fullmatch(name) for name in os.listdir(folder))
            for name in filter(None, names):
                found.setdefault(canonicalize_name(name[1]), name[2])  # the first on the path is imported
    return dict(sorted(found.items()))


def check_libraries(package: str = PACKAGE) -> None:
    """Print a line for each installed library of a release that a package is not tested with, and end the process if
    one is too old."""
    try:
        requirements = distribution(package).requires or []
    except PackageNotFoundError:  # run from a copy of the source code
        return
    untested = list(find_untested_libraries(requirements, list_installed()))
    for library in untested:
        print(f"{package}: {library}", file=sys.stderr)
    if any(library.is_too_old for library in untested):
        raise SystemExit(1)
