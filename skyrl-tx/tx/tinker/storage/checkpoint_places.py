"""Folders of named checkpoints under the base, and the checkpoints that folders hold: `tx recover` has nothing else.

RUN/KIND/NAME@SEQ                  SEQ: of the request that saved it, so that no two saves share a folder
RUN/KIND/BEGINNING/_REST@SEQ       of a name of more than 200 letters, for which file systems have no room
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from tx.tinker.types import CheckpointKind, TinkerPath

_LONGEST = 200
_RUN = re.compile(r".+:train:\d+")
_FOLDER = re.compile(r"(?P<name>.+)@(?P<seq>\d+)")


def get_folder_parts(path: TinkerPath, seq: int) -> tuple[str, ...]:
    """Return the parts of a checkpoint's folder under the base, as `Folders.place` takes them."""
    beginning, rest = path.name[:_LONGEST], path.name[_LONGEST:]
    if not rest:
        return path.run_id, path.kind, f"{beginning}@{seq}"
    return path.run_id, path.kind, beginning, f"_{rest}@{seq}"  # a part must not begin with '.' or '-'


def find_places(base: Path) -> Iterator[tuple[TinkerPath, int, Path]]:
    """Yield path, seq and folder of each checkpoint under a local base, whole or not."""
    for kind in get_args(CheckpointKind):
        for folder in sorted((*base.glob(f"*/{kind}/*@*"), *base.glob(f"*/{kind}/*/_*@*"))):
            run, _, *beginning = folder.relative_to(base).parent.parts
            name = folder.name.removeprefix("_") if beginning else folder.name
            if _RUN.fullmatch(run) and (found := _FOLDER.fullmatch("".join([*beginning, name]))):
                yield TinkerPath(run, kind, found["name"]), int(found["seq"]), folder
