"""Parsing of a recursive language model's turn: code to run, and its final answer. Pure functions of the text."""

import re

_FENCED = re.compile(r"^[ \t]*(?P<fence>`{3,})(?P<tag>[^\n`]*)\n(?P<body>.*?)^[ \t]*(?P=fence)[ \t]*$", re.M | re.S)
_FINAL_VAR = re.compile(r"^[ \t]*FINAL_VAR\([ \t]*[\"']?(\w+)[\"']?[ \t]*\)", re.M)
_FINAL = re.compile(r"^[ \t]*FINAL\(", re.M)


def extract_last_repl_block(text: str) -> str | None:
    """Extract the last fenced block with the tag repl, closed by a fence on its own line; None without one."""
    bodies = [block["body"] for block in _FENCED.finditer(text) if block["tag"].strip() == "repl"]
    return bodies[-1].rstrip("\n") if bodies else None


def extract_final_variable(text: str) -> str | None:
    """Return the name in the last `FINAL_VAR(name)` that begins a line, outside of fenced blocks.

    A call inside a block is handled by the REPL, since its branch may not be executed.
    """
    names = _FINAL_VAR.findall(_FENCED.sub("", text))
    return names[-1] if names else None


def final_text(text: str) -> str | None:
    """Extract the last `FINAL(...)` that begins a line outside of fenced blocks; it may be several lines long."""
    outside = _FENCED.sub("", text)
    starts = [found.end() for found in _FINAL.finditer(outside)]
    if not starts:
        return None
    rest, depth = outside[starts[-1] :], 1
    for position, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:position].strip()
    before, closed, _ = rest.rpartition(")")  # an unpaired bracket in the answer
    return before.strip() if closed else None
