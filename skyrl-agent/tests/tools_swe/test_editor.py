"""The editor in a real runtime."""

import random

import pytest

from skyrl_agent.errors import ConfigError
from skyrl_agent.runtimes import Limits, Runtime, RuntimeSpec, make_runtime
from skyrl_agent.tools.base import ToolContext
from skyrl_agent.tools.editor import StrReplaceEditor


@pytest.fixture
def edit(call):
    """`edit(command, path, ...)` -> its text."""
    tool = StrReplaceEditor(max_chars=3000)

    async def run(command: str, path: str, **arguments) -> str:
        return (await call(tool, command=command, path=path, **arguments)).text

    return run


async def test_undo_reverts_edits_and_creation(edit, runtime: Runtime):
    assert await edit("create", "pkg/m.py", file_text="a = 1\nb = 2\n") == "/workspace/pkg/m.py is created"
    assert await edit("str_replace", "/workspace/pkg/m.py", old_str="2", new_str="3") == (
        "/workspace/pkg/m.py is changed:\n     1\ta = 1\n     2\tb = 3"
    )
    assert "     3\tc = 4" in await edit("insert", "pkg/m.py", insert_line=2, new_str="c = 4")
    assert await runtime.read("pkg/m.py") == b"a = 1\nb = 3\nc = 4\n"
    await edit("undo_edit", "pkg/m.py")
    assert await runtime.read("pkg/m.py") == b"a = 1\nb = 3\n"
    await edit("undo_edit", "pkg/m.py")
    assert await runtime.read("pkg/m.py") == b"a = 1\nb = 2\n"
    assert "the file is gone" in await edit("undo_edit", "pkg/m.py")
    assert "no change of /workspace/pkg/m.py" in await edit("undo_edit", "pkg/m.py")


async def test_random_sequence_of_edits_can_be_undone(edit, runtime: Runtime):
    """The file has tabs, both kinds of line ends and none at the end."""
    chance = random.Random(7)
    content = b"\tone\r\ntwo\n\n  three\r\n\xc3\xa9 four"
    await runtime.write("f", content)
    contents = [content]
    while len(contents) < 8:
        if chance.random() < 0.5:
            word = chance.choice(["one", "two", "three", "four", "\n\n", "o\nt"])
            await edit("str_replace", "f", old_str=word, new_str=chance.choice(["five\nsix", "", "two two"]))
        else:
            await edit("insert", "f", insert_line=chance.randrange(4), new_str=chance.choice(["one", "a\nb\n"]))
        now = await runtime.read("f")
        if now != contents[-1]:
            contents.append(now)
    while len(contents) > 1:
        contents.pop()
        assert "taken back" in await edit("undo_edit", "f")
        assert await runtime.read("f") == contents[-1]


async def test_undo_preserves_changes_by_others(edit, runtime: Runtime):
    await edit("create", "f", file_text="a\n")
    await runtime.exec("echo b >>f")
    assert "changed since by something else" in await edit("undo_edit", "f")
    assert await runtime.read("f") == b"a\nb\n"


async def test_edits_keep_mode_and_symlinks(edit, runtime: Runtime):
    await runtime.exec("mkdir d; printf 'echo 1\\n' >d/run.sh; chmod 750 d/run.sh; ln -s d/run.sh link")
    assert "is changed" in await edit("str_replace", "link", old_str="1", new_str="2")
    seen = await runtime.exec("stat -c %a d/run.sh; readlink link; cat d/run.sh; ls -A d")
    assert seen.stdout == "750\nd/run.sh\necho 2\nrun.sh\n"
    assert "is created" in await edit("create", "/tmp/notes/x.txt", file_text="hello\n")
    assert await edit("view", "/tmp/notes/x.txt") == "     1\thello"


@pytest.mark.parametrize(
    "command, path, arguments, message",
    [
        ("create", "there", {"file_text": "x"}, "is there already"),
        ("create", "folder", {"file_text": "x"}, "is there already"),
        ("create", "/proc/x/y", {"file_text": "x"}, "could not be written and is as before"),
        ("create", "new", {}, "create needs file_text"),
        ("view", "missing", {}, "there is no /workspace/missing"),
        ("str_replace", "missing", {"old_str": "a"}, "there is no /workspace/missing"),
        ("str_replace", "there", {"new_str": "a"}, "str_replace needs old_str"),
        ("str_replace", "folder", {"old_str": "a"}, "is a folder"),
        ("str_replace", "latin", {"old_str": "a", "new_str": "b"}, "is not UTF-8 text (byte 3)"),
        ("insert", "binary", {"insert_line": 0, "new_str": "b"}, "is a binary file"),
        ("insert", "there", {"insert_line": 2, "new_str": "b"}, "from 0 (before the first line) to 1; got 2"),
        ("view", "there", {"view_range": [2, 3]}, "begins at line 2, and the file has 1"),
        ("view", "there", {"view_range": [1]}, "a first and a last line"),
        ("view", "there", {"view_range": [1, 0]}, "must be [first, last] from 1 to 1"),
        ("view", "folder", {"view_range": [1, 2]}, "view_range is for files"),
        ("view", "huge", {}, "has more than the 1048576 bytes"),
        ("view", "pipe", {}, "neither a file nor a folder"),
        ("jump", "there", {}, "must be one of"),
    ],
)
async def test_errors_are_returned_as_text(edit, runtime: Runtime, command, path, arguments, message):
    await runtime.exec(
        "echo hello >there; mkdir folder; printf 'caf\\xe9\\n' >latin; printf 'a\\0b' >binary; "
        "yes | head -c 2000000 >huge; mkfifo pipe"
    )
    assert message in await edit(command, path, **arguments)
    assert await runtime.read("there") == b"hello\n"


async def test_edit_exceeding_file_size_limit_is_reverted(runtime: Runtime):
    spec = RuntimeSpec(kind="local", limits=Limits(file_bytes=4096))
    async with make_runtime(spec) as small:
        await small.write("f", "precious\n")
        arguments = {"command": "insert", "path": "f", "insert_line": 1, "new_str": "x" * 8000}
        output = await StrReplaceEditor().call(ToolContext("trajectory", {}, small), arguments)
        assert output.failed and "could not be written and is as before" in output.text
        assert (await small.exec("cat f; ls -A")).stdout == "precious\nf\n"


async def test_folder_view_has_two_levels(edit, runtime: Runtime):
    await runtime.exec("mkdir -p p/a/b p/.git p/a/.hid; touch p/m.py p/a/n.py p/a/n.txt p/a/b/deep.py p/.env 'p/a b'")
    assert (await edit("view", "p")).split("\n")[1:] == ["a b", "a/", "a/b/", "a/n.py", "a/n.txt", "m.py"]
    assert (await edit("view", "p", python_only=True)).split("\n")[1:] == ["a/", "a/b/", "a/n.py", "m.py"]


async def test_view_shows_range_and_truncates_long_files(edit, runtime: Runtime):
    await runtime.write("f", "1\r\n\ttwo\r\n3\r\n4")
    assert await edit("view", "f", view_range=[2, 3]) == "     2\t\ttwo\n     3\t3"
    assert await edit("view", "f", view_range=[4, -1]) == "     4\t4"
    assert await edit("view", "f", view_range=[3, 99]) == "     3\t3\n     4\t4"
    await runtime.write("rows.txt", "".join(f"row {n}\n" for n in range(1000)))
    shown = await edit("view", "rows.txt")
    assert len(shown) <= 3000 and "more lines left out" in shown.split("\n")[-1]
    await runtime.write("wide.txt", "x" * 100_000)
    assert (await edit("view", "wide.txt")).endswith("x... 98000 more characters")


SOURCE = '''"""What it is for."""
import os


class Shelf:
    """Holds books."""

    size = 3

    @property
    def books(
        self,
    ) -> list:
        """All of them."""
        first = 1
        second = 2
        third = 3
        return [first, second, third]

    def one(self):
        return 1


def build(name):
    if name:
        return os.path.join(name)
    for letter in name:
        print(letter)
    return None
'''


async def test_view_outlines_functions_on_request_and_in_long_files(edit, runtime: Runtime):
    await runtime.write("shelf.py", SOURCE)
    shown = await edit("view", "shelf.py", concise=True)
    assert "     5\tclass Shelf:" in shown and "    10\t    @property" in shown and "    13\t    ) -> list:" in shown
    assert "    14\t        ...  # lines 14-18\n    19\t" in shown
    assert "    21\t        return 1" in shown  # too short to be left out
    assert "third" not in shown and shown.endswith("    25\t    ...  # lines 25-29")
    await runtime.write("long.py", "".join(SOURCE.replace("Shelf", f"Shelf{n}") for n in range(6)))
    shown = await edit("view", "long.py")
    assert "without the bodies of functions" in shown and "class Shelf5:" in shown and len(shown) <= 3000
    assert "third = 3" in await edit("view", "long.py", view_range=[10, 20])


async def test_edit_breaking_python_syntax_is_reported(edit, runtime: Runtime):
    await runtime.write("m.py", "def f():\n    return 1\n")
    assert "not valid Python any more: line 2" in await edit(
        "str_replace", "m.py", old_str="    return", new_str="return"
    )
    assert "not valid" not in await edit("str_replace", "m.py", old_str="return", new_str="    return")


def test_too_small_output_limit_is_rejected():
    with pytest.raises(ConfigError, match="max_chars"):
        StrReplaceEditor(max_chars=10)
