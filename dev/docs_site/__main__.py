"""Build the site: `make docs`, or `PYTHONPATH=dev .venv/bin/python -m docs_site [--output FOLDER]`."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from docs_site import api, links, pages, settings

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def stage(folder: Path, root: Path = ROOT) -> dict[str, Any]:
    """Write all pages, copied and generated, to `folder`/source and the configuration to `folder`. Returns: the
    configuration.
    """
    source = folder / "source"
    names = settings.read_names(root)
    copied = pages.pages(root)
    generated = {f"docs/api/{api.file_name(title)}": api.page(title) for title in api.CLASSES}
    existing = {*map(str, copied), *generated}
    for page in copied:
        text = pages.resolve_links((root / page).read_text(), page, root, existing)
        text = settings.with_anchors(text) if page in settings.REFERENCES else settings.with_links(text, page, names)
        if page in settings.PAGES_WITH_FILTER:
            text = text.replace("\n\n", '\n\n<div data-filter="a setting, or words of its meaning"></div>\n\n', 1)
        _write(source / page, text)
    for path, text in generated.items():
        _write(source / path, text)
    shutil.copytree(root / "docs/images", source / "docs/images", dirs_exist_ok=True)
    shutil.copytree(HERE / "assets", source / "assets", dirs_exist_ok=True)
    config = site_config(existing, root)
    _write(folder / "mkdocs.yml", yaml.safe_dump(config, sort_keys=False))
    return config


def site_config(existing: set[str], root: Path = ROOT) -> dict[str, Any]:
    """Return the configuration of the site with its whole table of contents."""
    config: dict[str, Any] = yaml.safe_load((HERE / "mkdocs.yml").read_text())
    config["nav"] = pages.expand(config["nav"], sorted(existing))
    mkdocstrings = next(each["mkdocstrings"] for each in config["plugins"] if isinstance(each, dict))
    mkdocstrings["handlers"]["python"]["paths"] = [str(root / folder) for folder in api.SOURCES]
    return config


def build(folder: Path) -> list[str]:
    """Build the site to `folder`/html in strict mode. Returns: its errors, one line each."""
    shutil.rmtree(folder, ignore_errors=True)
    stage(folder)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(folder / "mkdocs.yml")]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if finished.returncode != 0:
        return [finished.stdout + finished.stderr]
    return links.problems(folder / "html")


def main() -> int:
    """Build the site, and print its errors or its location."""
    parser = argparse.ArgumentParser(prog="docs_site", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "docs")
    folder = parser.parse_args().output.resolve()
    found = build(folder)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    print(f"{folder / 'html' / 'index.html'}: python -m http.server -d {folder / 'html'} serves it, with the search")
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
