"""Changes of texts, alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_agent.tools.editing import get_line_end, insert_after, replace_once, split_lines

TEXTS = st.text(alphabet="ab \t\n\r\u2028é", max_size=40)


@pytest.mark.parametrize(
    "text, old, new, after, line",
    [
        ("a\nb\nc\n", "b", "B", "a\nB\nc\n", 2),
        ("a\nb\nc", "c", "C\nD", "a\nb\nC\nD", 3),  # no newline at the end: none after
        ("a\r\nb\r\nc\r\n", "a\nb", "x\ny", "x\r\ny\r\nc\r\n", 1),  # the file's line ends
        ("a\nb\r\nc\n", "b\nc", "x\ny", "a\nx\r\ny\n", 2),  # mixed: those of what is replaced
        ("a\nb\n", "a\r\nb", "x", "x\n", 1),  # a model that writes the other kind
        ("\tif x:\n\t\ty\n", "\t\ty", "\t\tz", "\tif x:\n\t\tz\n", 2),  # tabs stay tabs
        ("a\n\nb\n", "\nb", "", "a\n\n", 2),  # deleted
        ("a\x0cb\u2028c\n", "c", "d", "a\x0cb\u2028d\n", 1),  # only \n ends a line
        ("x = r'\\d.*'\n", "r'\\d.*'", "r'\\1\\g<0>'", "x = r'\\1\\g<0>'\n", 1),  # nothing is a pattern
    ],
)
def test_unique_match_is_replaced(text, old, new, after, line):
    assert replace_once(text, old, new) == (after, line)


@pytest.mark.parametrize(
    "text, old, new, message",
    [
        ("a\n", "", "b", "use the command insert"),
        ("a\n", "a", "a", "are the same"),
        ("x\na\nb\na\n", "a", "b", "2 times, beginning on the lines 2, 4, so nothing was changed"),
        ("aaa\n", "aa", "b", "2 times, beginning on the lines 1, 1"),  # they overlap
        ("def f():\n    return 1\n", "def f():\n\treturn 1", "x", "From line 1 on it is there with other white space"),
        ("def total(rows):\n    pass\n", "def totals(row):", "x", "     1\tdef total(rows):"),
        ("a\n", "something else entirely", "x", "No line resembles it"),
    ],
)
def test_failed_replacement_returns_help(text, old, new, message):
    with pytest.raises(ValueError) as raised:
        replace_once(text, old, new)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text, line, inserted, after",
    [
        ("a\nb\n", 0, "x", "x\na\nb\n"),
        ("a\nb\n", 1, "x\n", "a\nx\nb\n"),
        ("a\nb\n", 2, "x\ny", "a\nb\nx\ny\n"),
        ("a\nb", 2, "x\n", "a\nb\nx"),  # the last line had no end, and has none
        ("a\r\nb", 2, "x\ny", "a\r\nb\r\nx\r\ny"),
        ("a\r\nb\r\n", 1, "x", "a\r\nx\r\nb\r\n"),
        ("", 0, "x", "x\n"),
        ("a\n", 1, "", "a\n\n"),
    ],
)
def test_lines_are_inserted(text, line, inserted, after):
    assert insert_after(text, line, inserted) == after


@pytest.mark.parametrize("line", [-1, 3])
def test_missing_line_is_reported(line):
    with pytest.raises(ValueError, match=rf"from 0 \(before the first line\) to 2; got {line}"):
        insert_after("a\nb\n", line, "x")


@given(TEXTS, TEXTS, TEXTS)
def test_replacement_preserves_surrounding_text(before, old, after):
    text = before + old + after
    try:
        changed, line = replace_once(text, old, "NEW")
    except ValueError:
        return
    start = changed.index("NEW")
    assert line == text.count("\n", 0, start) + 1
    rest = changed[start + 3 :]
    assert text.startswith(changed[:start]) and text.endswith(rest)
    replaced = text[start : len(text) - len(rest)]
    assert replaced.replace("\r\n", "\n") == old.replace("\r\n", "\n")


@given(TEXTS, st.integers(0, 5))
def test_insertion_preserves_other_lines(text, line):
    lines = split_lines(text)
    assert "".join(lines) == text
    if line > len(lines):
        return
    changed = split_lines(insert_after(text, line, "NEW"))
    assert changed[line].rstrip("\r\n") == "NEW"
    rest = [*changed[:line], *changed[line + 1 :]]
    assert [part.removesuffix(get_line_end(text)) for part in rest] == [
        part.removesuffix(get_line_end(text)) for part in lines
    ]
    assert changed[-1].endswith("\n") == (text == "" or text.endswith("\n"))
