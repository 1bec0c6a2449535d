"""The check of installed libraries at the start of a command."""

from pathlib import Path

import pytest

from skyrl_train.library_versions import check_libraries, find_untested_libraries

REQUIREMENTS = [
    "torch<2.15,>=2.11",
    "ray==2.60.0",
    "skyrl-gym",
    'vllm==0.32.0; sys_platform == "linux" and extra == "vllm"',
]


@pytest.mark.parametrize(
    ("installed", "untested"),
    [
        ({"torch": "2.13.0+cpu", "ray": "2.60.0", "skyrl-gym": "0.1.0"}, {}),
        ({"torch": "2.11.0a0+nv26.1", "ray": "2.60.0"}, {"torch": False}),
        ({"torch": "2.15.1", "ray": "2.59.0"}, {"torch": False, "ray": False}),
        ({"torch": "2.14.0", "vllm": "0.33.0"}, {"vllm": False}),
        ({"torch": "2.10.0"}, {"torch": True}),
    ],
)
def test_releases_outside_requirements_are_found(installed: dict[str, str], untested: dict[str, bool]):
    found = find_untested_libraries(REQUIREMENTS, installed)
    assert {library.name: library.is_too_old for library in found} == untested


def install(folder: Path, name: str, version: str) -> None:
    """Make the metadata of an installed package."""
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_newer_library_gives_one_line(tmp_path: Path, monkeypatch, capsys):
    install(tmp_path, "transformers", "99.1.0")
    monkeypatch.syspath_prepend(tmp_path)
    check_libraries()
    [line] = capsys.readouterr().err.splitlines()
    assert "transformers 99.1.0" in line and "INSTALL.md" in line


def test_older_library_ends_process_with_one_line(tmp_path: Path, monkeypatch, capsys):
    install(tmp_path, "transformers", "4.40.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        check_libraries()
    [line] = capsys.readouterr().err.splitlines()
    assert "transformers 4.40.0" in line


def test_libraries_of_named_package_are_checked(tmp_path: Path, monkeypatch, capsys):
    install(tmp_path, "httpx", "0.1.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        check_libraries("skyrl-agent")
    assert capsys.readouterr().err.startswith("skyrl-agent: httpx 0.1.0")


def test_tested_libraries_give_no_line(capsys):
    check_libraries()
    assert capsys.readouterr().err == ""
