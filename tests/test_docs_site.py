"""The documentation site: its table of contents, generated pages, and the built HTML."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from docs_site import api, links, pages, settings
from docs_site.__main__ import build, site_config, stage

ROOT = Path(__file__).parents[1]
MIGRATIONS = sorted((ROOT / "docs/migration").glob("*.md"))
NAMES = settings.read_names(ROOT)


def test_pages_are_listed_once_in_table_of_contents():
    existing = {str(page) for page in pages.pages(ROOT)}
    listed = list(pages.paths_of(site_config(existing)["nav"]))
    assert sorted(listed) == sorted(existing)


def test_table_of_contents_has_no_empty_sections():
    generated = {f"docs/api/{api.file_name(title)}" for title in api.CLASSES}
    nav = site_config({*map(str, pages.pages(ROOT)), *generated})["nav"]
    assert [title for section in nav for title, entries in section.items() if not entries] == []


def test_new_page_is_added_to_reference():
    existing = {str(page) for page in pages.pages(ROOT)} | {"docs/new.md"}
    nav = site_config(existing)["nav"]
    assert "docs/new.md" in next(section["Reference"] for section in nav if "Reference" in section)


def rows(page: Path) -> Iterator[list[str]]:
    """Yield the cells of each row of the page's tables of settings."""
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[1] != "here":
            yield cells


@pytest.mark.parametrize("page", MIGRATIONS, ids=lambda page: page.stem)
def test_migration_names_existing_settings(page):
    """Each of our names is in the second column, or in the third with its full path."""
    known = NAMES | settings.sections(NAMES)
    table = list(rows(page))
    assert len(table) > 30
    ours = [name for cells in table for name in re.findall(r"`([^`=]+)(?:=[^`]*)?`", cells[1])]
    ours += [
        name for cells in table for name in re.findall(r"`((?:trainer|generator|data)\.[\w.]+)", "|".join(cells[2:]))
    ]
    assert [name for name in ours if name not in known] == []


@pytest.mark.parametrize("page", MIGRATIONS, ids=lambda page: page.stem)
def test_migration_names_each_foreign_setting_once(page):
    foreign = [name for cells in rows(page) for name in re.findall(r"`([^`]+)`", cells[0])]
    repeated = {name for name in foreign if foreign.count(name) > 1}
    assert repeated <= {"gradient_accumulation_steps", "per_device_train_batch_size"}


def test_migration_chooses_values_that_are_settings_choices():
    choices = {
        match[1]: re.split(r", | or ", match[2])
        for match in re.finditer(
            r"^\| `([\w.]+)` \| one of ([^|]+?) \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE
        )
    }
    chosen = [
        pair
        for page in MIGRATIONS
        for cells in rows(page)
        for pair in re.findall(r"`([\w.]+)=([\w+]+)`", "|".join(cells[1:]))
    ]
    assert len(chosen) > 10
    assert [(name, value) for name, value in chosen if name in choices and value not in choices[name]] == []


def test_reference_describes_every_error_class():
    modules = {name.rpartition(".")[0] for name in api.CLASSES["Errors"]}
    assert modules == {"skyrl_train.errors", "skyrl_gym.error", "skyrl_agent.errors", "tx.errors"}
    for module in modules:
        path = api.source_of(f"{module}.Error", ROOT)
        assert path is not None
        classes = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        assert {f"{module}.{name}" for name in classes} <= set(api.CLASSES["Errors"])


def test_referenced_classes_exist():
    for name in (name for names in api.CLASSES.values() for name in names):
        source = api.source_of(name, ROOT)
        assert source is not None, name
        body = ast.parse(source.read_text()).body
        defined = {getattr(node, "name", None) for node in body}
        defined |= {ast.unparse(target) for node in body if isinstance(node, ast.Assign) for target in node.targets}
        assert name.rpartition(".")[2] in defined, name


def test_classes_subclassed_in_documentation_are_in_reference():
    texts = "".join(page.read_text() for page in [*ROOT.glob("docs/*.md"), ROOT / "README.md"])
    bases = set(re.findall(r"^class \w+\((\w+)\)", texts, re.MULTILINE))
    described = {name.rpartition(".")[2] for names in api.CLASSES.values() for name in names}
    assert len(bases) >= 5
    assert bases - described == set()


def test_glossary_is_sorted_and_used():
    lines = (ROOT / "docs/glossary.md").read_text().splitlines()
    terms = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]
    assert terms == sorted(terms)
    others = "".join(page.read_text().lower() for page in ROOT.glob("docs/*.md") if page.name != "glossary.md")
    assert [term for term in terms if any(word not in others for word in term.split(", "))] == []


def test_settings_are_linked_outside_of_code_and_links(tmp_path):
    text = "`trainer.seed=1` [`trainer.seed`](x.md) `trainer.nonsense`\n```\n`trainer.seed`\n```\n"
    linked = settings.with_links(text, settings.REFERENCES[0].parent / "migration" / "a.md", NAMES)
    assert linked.startswith(
        "[`trainer.seed=1`](../configuration.md#trainer.seed) [`trainer.seed`](x.md) `trainer.nonsense`"
    )
    assert linked.endswith("```\n`trainer.seed`\n```\n")


def test_folder_links_resolve_to_readme():
    page = settings.REFERENCES[0].with_name("recipes.md")
    text = "[a](../examples/recipes) [b](../Makefile) [c](engines.md#weights)"
    resolved = pages.resolve_links(text, page, ROOT, {"examples/recipes/README.md", "docs/engines.md"})
    assert resolved == "[a](../examples/recipes/README.md) b [c](engines.md#weights)"


@pytest.mark.parametrize(
    "html, problem",
    [
        ('<a href="b.html">', "a.html: b.html does not exist"),
        ('<a href="#there">', "a.html: #there has no such anchor"),
        ('<h1 id="here"></h1><a href="a.html#here">', None),
        ('<script src="https://cdn.example/x.js">', "a.html: loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/css">', "a.html: loads //fonts.example/css"),
        ('<p style="background: url(https://example.org/x.png)">', "a.html: loads https://example.org/x.png"),
        ('<a href="https://example.org">', None),  # a reader may follow it; nothing is loaded
    ],
)
def test_page_problem_is_detected(tmp_path, html, problem):
    (tmp_path / "a.html").write_text(html)
    assert links.problems(tmp_path) == ([problem] if problem else [])


def test_stylesheet_loading_font_is_detected(tmp_path):
    (tmp_path / "a.css").write_text("@font-face { src: url('https://fonts.example/a.woff2') }")
    assert links.problems(tmp_path) == ["a.css: loads https://fonts.example/a.woff2"]


def test_staged_configuration_lists_generated_pages(tmp_path):
    stage(tmp_path)
    listed = list(pages.paths_of(yaml.safe_load((tmp_path / "mkdocs.yml").read_text())["nav"]))
    assert {"docs/api/errors.md", "docs/api/environments.md"} <= set(listed)
    assert [path for path in listed if not (tmp_path / "source" / path).exists()] == []


@pytest.mark.slow
def test_site_has_no_broken_links_or_external_resources(tmp_path):
    pytest.importorskip("zensical", reason="the dependency group `docs` has the builder")
    assert build(tmp_path / "site") == []
    html = (tmp_path / "site/html/docs/configuration.html").read_text()
    assert 'id="trainer.seed"' in html
    assert "CountVowels" not in (tmp_path / "site/html/docs/api/environments.html").read_text()
    assert "BaseTextEnv" in (tmp_path / "site/html/docs/api/environments.html").read_text()
