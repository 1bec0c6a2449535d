"""The program in what a model wrote."""

import re

_FENCED = re.compile(r"```[^\n`]*```|```([^\n`]*)\n(.*?)```", re.DOTALL)
_LABEL = re.compile(r"\w*|py.*", re.IGNORECASE)


def extract_code(text: str) -> str | None:
    """Return the last fenced block, stripped, or None.

    A block's label is a word (or begins with `py`) or missing. Blocks with another label, such as `c++`, are
    skipped, and so is a fence that opens and closes in one line.
    """
    code = None
    for block in _FENCED.finditer(text):
        if block[1] is not None and _LABEL.fullmatch((block[1].split() or [""])[0]):
            code = block[2].strip()
    return code
