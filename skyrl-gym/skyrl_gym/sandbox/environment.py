"""Environment variables of a command, kept out of command lines, which every user can read in /proc.

They are passed as shell lines in variables with fixed names, so that variables such as `LD_PRELOAD`, `PATH` and
`DOCKER_HOST` affect only the command and not the programs that start it.
"""

import re
from collections.abc import Mapping, Sequence

from skyrl_gym.sandbox.command import as_bytes

CARRIER = "SKYRL_GYM_ENVIRONMENT"
CHUNK_CHARACTERS = 30_000
"""Length of one carrier: Linux starts nothing with a variable of more than 128 KiB, and a character has up to four
bytes."""
MAX_BYTES = 1 << 20
"""Size of all carriers: Linux allows 2 MiB for arguments and variables together, with the usual limit of the stack."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OF_SHELLS = re.compile(
    r"_|E?UID|PPID|GROUPS|S?RANDOM|SECONDS|EPOCH(SECONDS|REALTIME)|LINENO|OPTIND|SHELLOPTS|SHLVL|DIRSTACK|FUNCNAME|HISTCMD"
    r"|GLOBIGNORE|BASH.*|LC_.*"
)
"""Names that a shell reserves for itself, or whose values it obeys or complains of, where `sh` is dash or bash. `env`
sets them, from the command line: they are no place for a key."""


def carried(env: Mapping[str, str] | None, command: Sequence[str | bytes]) -> tuple[dict[str, bytes], list[bytes]]:
    """Pack variables for a command. Returns the variables for its launcher, and the command line that unpacks them.

    Args:
        command: runs with `env` in addition to the variables of its surroundings.

    Raises:
        ValueError: a name that no shell can export, a zero byte, or more data than Linux accepts.
    """
    words = [as_bytes(part) for part in command]
    if not env:
        return {}, words
    check_variables(env)
    quoted = (f"{name}='{_quote_value(value)}'" for name, value in env.items() if not OF_SHELLS.fullmatch(name))
    lines = "".join(f"export {variable}\n" for variable in quoted)
    chunks = [as_bytes(lines[at : at + CHUNK_CHARACTERS]) for at in range(0, len(lines), CHUNK_CHARACTERS)]
    if (size := sum(map(len, chunks))) > MAX_BYTES:
        raise ValueError(f"the environment variables have {size} bytes, more than {MAX_BYTES}")
    carriers = {f"{CARRIER}_{number}": chunk for number, chunk in enumerate(chunks)}
    if of_shells := [as_bytes(f"{name}={value}") for name, value in env.items() if OF_SHELLS.fullmatch(name)]:
        words = [b"env", *of_shells, *words]
    unpack = f'eval "{"".join(f"${{{name}}}" for name in carriers)}"; unset {" ".join(carriers)}; exec "$@"'
    return carriers, [b"sh", b"-c", unpack.encode(), b"sh", *words] if carriers else words


def check_variables(env: Mapping[str, str]) -> None:
    """Check variables of a sandbox's commands, before there is one.

    Raises:
        ValueError: a name that no shell can export, or a zero byte.
    """
    for name, value in env.items():
        if NAME.fullmatch(name) is None:
            raise ValueError(
                f"the environment variable {name!r} must have a name of letters, digits and underscores that does not "
                "start with a digit: the shell that starts commands cannot pass on others"
            )
        if "\0" in value:
            raise ValueError(f"the environment variable {name} has a zero byte")


def _quote_value(value: str) -> str:
    return value.replace("'", "'\\''")
