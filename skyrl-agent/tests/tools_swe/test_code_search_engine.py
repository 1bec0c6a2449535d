"""Questions about small repositories, and about skyrl_gym."""

import ast
import os
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyrl_gym
from skyrl_agent.tools.code_search import RepositorySearch
from skyrl_agent.tools.code_search.engine.outline import outline
from skyrl_agent.tools.code_search.engine.render import clipped
from skyrl_agent.tools.code_search.engine.source import FilePattern

SHOP = {
    "src/shop/__init__.py": "from .stock import Stock as Shelf\n",
    "src/shop/base.py": '''
class Base:
    """What can be emptied."""

    def empty(self):
        return self.count()

    def count(self):
        raise NotImplementedError
''',
    "src/shop/stock.py": '''
import json
from collections.abc import Mapping
from shop import base
from shop.base import Base
from . import tools as t


class Stock(Base, Mapping[str, int]):
    """Things in a shop.

    Many.
    """

    @property
    def size(self): return t.total(self.rows)

    async def count(
        self,
        kind: str = "all",  # of these
    ) -> int:
        def inner():
            return helper(kind)
        return inner() + super().count()

    def renew(self):
        self.empty()
        self.count()
        json.dumps({})


def helper(kind):
    return Stock().renew()
''',
    "src/shop/tools.py": '''
"""Sums."""
import shop

def total(rows):
    other = rows[0]
    other.count()
    return sum(rows)

class Other(shop.Shelf):
    def count(self):
        return total([1])
''',
    "src/shop/broken.py": "def half(:\n    needle_in_broken = 1\n",
    "README.md": "needle in the manual\n",
    "image.py": "\0\1\2",
    "latin.py": b"# caf\xe9 needle_latin\nx = 1\n",
    ".git/hook.py": "def hidden(): pass\n",
    "env/pyvenv.cfg": "home = /usr\n",
    "env/lib/module.py": "def hidden(): pass\n",
    "src/__pycache__/old.py": "def hidden(): pass\n",
}

Make = Callable[[dict], RepositorySearch]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def repository(contents: dict) -> RepositorySearch:
        for path, text in contents.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return RepositorySearch(str(tmp_path))

    return repository


@pytest.fixture
def shop(make: Make) -> RepositorySearch:
    return make(SHOP)


def related(search: RepositorySearch, relation: str, term: str) -> list[str]:
    """The lines of the answer, without indentation and heading."""
    return [line.strip() for line in search.search([term], relation=relation).split("\n")[1:]]


@pytest.mark.parametrize(
    "term, found",
    [
        ("src/shop/stock.py:Stock.renew", "src/shop/stock.py:Stock.renew  (method, lines 26-29)"),
        ("stock.py:Stock.renew", "src/shop/stock.py:Stock.renew  (method, lines 26-29)"),
        ("src/shop/stock.py::Stock::renew", "src/shop/stock.py:Stock.renew  (method, lines 26-29)"),
        ("Stock.renew", "src/shop/stock.py:Stock.renew  (method, lines 26-29)"),
        ("renew", "src/shop/stock.py:Stock.renew  (method, lines 26-29)"),
        ("RENEW", "src/shop/stock.py:Stock.renew  (method, lines 26-29)"),
        ("shop.stock.Stock.renew", "src/shop/stock.py:Stock.renew  (method, lines 26-29)"),
        ("inner", "src/shop/stock.py:Stock.count.inner  (function, lines 22-23)"),
        ("size", "src/shop/stock.py:Stock.size  (method, lines 15-16)"),
        ("tools.py", "src/shop/tools.py  (file, 12 lines)"),
    ],
)
def test_entity_is_found_by_term(shop, term, found):
    assert shop.search([term]).split("\n")[1] == found


def test_ambiguous_name_finds_all_entities(shop):
    answer = shop.search(["count"], style="fold")
    assert "3 entities have this name" in answer
    assert "async def count(self, kind: str='all') -> int:" in answer
    assert "also as text, 7 times in 3 files" in answer


def test_result_formats(shop):
    whole = shop.search(["Stock"], style="complete")
    assert "    21\t    ) -> int:" in whole and "    29\t        json.dumps({})" in whole
    preview = shop.search(["Stock"], style="preview")
    assert "    18\t" in preview and "more lines" in preview and "json.dumps" not in preview
    fold = shop.search(["Stock"], style="fold")
    assert "class Stock(Base, Mapping[str, int]):  # Things in a shop." in fold
    assert "    26\tdef renew(self):" in fold and "    16\tdef size(self):" in fold and "json.dumps" not in fold


def test_callers_and_callees_are_found(shop):
    assert related(shop, "callers", "Stock.renew") == [
        "by the name alone (the object may be of another class):",
        "src/shop/stock.py:helper  line 33",
    ]
    assert related(shop, "callers", "stock.py:helper") == ["src/shop/stock.py:Stock.count.inner  line 23"]
    assert related(shop, "callers", "tools.py:total") == [
        "src/shop/stock.py:Stock.size  line 16",
        "src/shop/tools.py:Other.count  line 12",
    ]
    assert related(shop, "callers", "Base.count") == [
        "src/shop/base.py:Base.empty  line 6",
        "src/shop/stock.py:Stock.count  line 24",
        "by the name alone (the object may be of another class):",
        "src/shop/tools.py:total  line 7",
    ]
    assert related(shop, "callers", "Base.empty") == ["src/shop/stock.py:Stock.renew  line 27"]
    assert related(shop, "callers", "stock.py:Stock") == ["src/shop/stock.py:helper  line 33"]
    assert related(shop, "callees", "Stock.renew") == [
        "src/shop/base.py:Base.empty  line 27",
        "src/shop/stock.py:Stock.count  line 28",
    ]
    assert related(shop, "callees", "Stock.size") == ["src/shop/tools.py:total  line 16"]


def test_inherited_members_and_imports_are_found(shop):
    assert related(shop, "inherits", "stock.py:Stock") == [
        "bases:",
        "Base  -> src/shop/base.py:Base",
        "Mapping  -> outside of this repository",
        "direct subclasses:",
        "src/shop/tools.py:Other  (line 10)",
    ]
    assert related(shop, "inherits", "helper") == ["not a class"]
    assert related(shop, "imports", "stock.py") == [
        "imports:",
        "import json  -> outside of this repository",
        "from collections.abc import Mapping  -> outside of this repository",
        "from shop import base  -> src/shop/base.py",
        "from shop.base import Base  -> src/shop/base.py",
        "from . import tools  -> src/shop/tools.py",
        "imported by:",
        "src/shop/__init__.py",
    ]


def test_names_are_resolved_by_scope(make):
    """A local function hides an imported one; a module of the standard library is none of ours."""
    search = make(
        {
            "a/__init__.py": "",
            "a/json.py": "def dumps(): pass\n",
            "a/other.py": "import json\nfrom a.json import dumps\n\ndef f():\n    def dumps(): pass\n    dumps()\n"
            "    json.dumps()\n\ndef g():\n    dumps()\n",
        }
    )
    assert related(search, "callers", "a/json.py:dumps") == ["a/other.py:g  line 10"]
    assert related(search, "callers", "a/other.py:f.dumps") == ["a/other.py:f  line 6"]


def test_circular_imports_terminate(make):
    search = make({"a.py": "from b import *\nx()\n", "b.py": "from a import *\nclass C(D): pass\nclass D(C): pass\n"})
    assert related(search, "callees", "a.py") == ["none in this repository"]
    assert related(search, "callers", "C") == ["none in this repository"]
    search = make({"c.py": "class C(D):\n    def f(self): self.g()\nclass D(C): pass\n"})
    assert related(search, "callees", "c.py:C.f") == ["none in this repository"]


def test_text_is_found_outside_of_names(shop):
    assert "src/shop/tools.py:8 (in total): return sum(rows)" in shop.search(["return sum("])
    assert "src/shop/broken.py:2: needle_in_broken = 1" in shop.search(["needle_in_broken"])
    assert "latin.py:1: # café needle_latin" in shop.search(["needle_latin"])
    assert "(in another case), 1 times" in shop.search(["RETURN SUM("])
    assert "README.md:1: needle in the manual" in shop.search(["needle in"], "*.md")
    assert "nothing found" in shop.search(["hidden"])  # a third party's
    assert "not valid Python, searched as text alone: line 1" in shop.search(["broken.py"])


def test_entities_are_ranked_by_words_without_match(shop):
    answer = shop.search(["sum total of rows"])
    assert "closest by its words" in answer
    assert answer.split("\n")[2].startswith("src/shop/tools.py:total ")


def test_frequent_text_is_counted_per_file(make):
    search = make({f"m{n:02}.py": "needle()\n" * (n + 1) for n in range(30)})
    answer = search.search(["needle("])
    assert "as text, 465 times in 30 files" in answer
    assert "m29.py: 30 (lines 1, 2, 3, 4, 5, 6, 7, 8, ...)" in answer
    assert "and 10 more files: narrow the search" in answer
    assert "as text, 1 times in 1 files" in search.search(["needle("], "m00.py")


def test_lines_are_shown_with_context(make):
    search = make({"a.py": "".join(f"x{n} = {n}\n" for n in range(1, 201))})
    answer = search.search(lines=[5, 100, 130], files="a.py")
    numbers = [int(line.split("\t")[0]) for line in answer.split("\n") if "\t" in line]
    assert numbers == [*range(1, 26), *range(80, 151)]


@pytest.mark.parametrize(
    "question, message",
    [
        (
            {"terms": ["x"], "files": "src/shop/stok.py"},
            "no file is meant by 'src/shop/stok.py'; close: src/shop/stock",
        ),
        ({"lines": [1]}, "lines need one file"),
        ({"lines": [100], "files": "stock.py"}, "has the lines 1 to 33; there is no line 100"),
        ({}, "nothing to search for"),
        ({"terms": ["x"], "max_chars": 10}, "max_chars must be at least 200"),
    ],
)
def test_empty_search_result_explains_usage(shop, question, message):
    with pytest.raises(ValueError) as raised:
        shop.search(**question)
    assert message in str(raised.value)


def test_missing_folder_is_rejected():
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        RepositorySearch("/nonexistent").search(["x"])


def test_only_changed_files_are_reindexed(make, tmp_path):
    contents = {f"m{n}.py": f"def f{n}(): pass\n" for n in range(5)}
    search = make(contents)
    assert search.index.update() == 5
    assert search.index.update() == 0
    (tmp_path / "m1.py").write_text("def g1(): pass\n")  # as long as before, perhaps in the same tick of the clock
    (tmp_path / "m2.py").unlink()
    (tmp_path / "new.py").write_text("def fresh(): pass\n")
    os.utime(tmp_path / "m3.py", (1, 1))  # touched, not changed
    assert search.index.update() == 2
    assert "m1.py:g1" in search.search(["g1"]) and "new.py:fresh" in search.search(["fresh"])
    assert "nothing found" in search.search(["f2"])


def test_index_is_persistent_and_rebuilt_when_corrupt(make, tmp_path):
    make({"a.py": "def f(): pass\n"})
    cache = tmp_path / "index"
    assert RepositorySearch(str(tmp_path), str(cache)).index.update() == 1
    assert RepositorySearch(str(tmp_path), str(cache)).index.update() == 0
    for spoiled in (b"", b"nonsense", cache.read_bytes()[:50]):
        cache.write_bytes(spoiled)
        again = RepositorySearch(str(tmp_path), str(cache))
        assert "a.py:f" in again.search(["f"])


@pytest.mark.parametrize(
    "pattern, selected",
    [
        ("**/*.py", ["a.py", "d/a.py", "d/e/b.py"]),
        ("*.py", ["a.py", "d/a.py", "d/e/b.py"]),
        ("d/*.py", ["d/a.py"]),
        ("d/**/*.py", ["d/a.py", "d/e/b.py"]),
        ("d", ["d/a.py", "d/e/b.py"]),
        ("./d/", ["d/a.py", "d/e/b.py"]),
        ("/repo/d/e", ["d/e/b.py"]),
        ("a.py", ["a.py"]),
        ("e/b.py", ["d/e/b.py"]),
        ("[ab].py", ["a.py", "d/a.py", "d/e/b.py"]),
        ("?.py", ["a.py", "d/a.py", "d/e/b.py"]),
        ("d/[!a].py", []),
        ("[", []),
        ("", ["a.py", "d/a.py", "d/e/b.py"]),
    ],
)
def test_file_pattern_selects_files(pattern, selected):
    assert FilePattern(pattern, "/repo").select(["a.py", "d/a.py", "d/e/b.py"]) == selected


@given(st.text(alphabet="ab*?[]!/\\.^-", max_size=12))
def test_empty_pattern_is_rejected(pattern):
    FilePattern(pattern, "/repo").select(["a", "b/a"])


@given(st.text(alphabet="abc\n", max_size=600), st.integers(200, 400))
def test_output_stays_within_budget(content, budget):
    assert len(clipped(content, budget)) <= budget


@pytest.fixture(scope="module")
def gym() -> RepositorySearch:
    return RepositorySearch(str(Path(skyrl_gym.__file__).parent))


@pytest.mark.parametrize("budget", [200, 500, 2000, 20_000])
@pytest.mark.parametrize("style", [None, "complete", "preview", "fold"])
def test_output_of_real_package_reports_omissions(gym, budget, style):
    for terms in (["Workspace"], ["exec"], ["import"], ["Workspace", "exec", "self", "no such words"]):
        answer = gym.search(terms, style=style, max_chars=budget)
        assert 0 < len(answer) <= budget
    assert gym.search(["Workspace"], style="complete", max_chars=2000).count("shown as") == 1


def test_entities_of_real_package_are_found_by_id(gym):
    gym.index.update()
    for path, file in gym.index.files.items():
        assert file.error == ""
        for entity in file.entities:
            lines = file.lines
            assert f"{entity.name.rpartition('.')[2]}" in lines[entity.line - 1]
            assert entity.signature.endswith(":") or len(entity.signature) == 300
        for entity in file.entities[:2]:
            assert f"{path}:{entity.name}  ({entity.kind}" in gym.search([f"{path}:{entity.name}"], style="fold")


def test_callers_in_real_package(gym):
    answer = related(gym, "callers", "sandbox/workspace.py:split_path")
    assert "sandbox/workspace.py:Workspace.read" in "\n".join(answer) and "by the name alone" not in "\n".join(answer)


@given(st.text(alphabet="def class():\n\t xy=@[]{}'\"\\#,.", max_size=80))
def test_parser_accepts_arbitrary_text(text):
    assert outline(text).error or outline(text).entities is not None


def test_deep_nesting_raises_error():
    assert outline("(" * 5000 + ")" * 5000).error
    assert outline("x = " + "-" * 50_000 + "1").error


def test_engine_runs_on_old_python_standard_library():
    engine = files("skyrl_agent.tools.code_search") / "engine"
    for file in engine.iterdir():
        if not file.name.endswith(".py"):
            continue
        tree = ast.parse(file.read_text(), feature_version=(3, 8))
        for node in ast.walk(tree):
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module or "")
            assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
