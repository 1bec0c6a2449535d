"""Calls of a container engine's command line, its images, and the usual causes of its errors."""

import re
import subprocess
from collections.abc import Sequence
from typing import Literal, get_args

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.keyed_locks import KeyedLocks

EngineName = Literal["docker", "podman"]
Pull = Literal["always", "missing", "never"]
"""When an image is pulled: once in each process, if it is not here, or never."""

START_SECONDS = 600.0
"""The first start may download the image."""
CALL_SECONDS = 60.0
NOT_HERE = re.compile(r"no such image|image not known|unable to find image|failed to find image", re.IGNORECASE)
REMEDIES: dict[str, str] = {
    r"cannot connect to the docker daemon|is the docker daemon running|unable to connect to podman socket": (
        "its daemon does not run: start it (systemctl start docker), or use podman, which needs none"
    ),
    r"permission denied.*(docker daemon|docker api|\.sock)": (
        "this user may not use its socket: add the user to the group docker (usermod -aG docker USER, then log in "
        "again), or use podman, which needs no daemon"
    ),
    r"no space left on device|disk quota exceeded": (
        "its disk is full: `{engine} system df` shows what takes the room, `{engine} system prune` makes some"
    ),
    NOT_HERE.pattern
    + r"|manifest unknown|access denied|unauthorized|short-name|no such host|dial tcp|pinging container registry"
    + r"|i/o timeout|name unknown|repository .* not found": (
        "the image is not here, and the registry did not give it: check the name, tag and `{engine} login`, copy it "
        "here (`{engine} load` or `{engine} import`), or make one of this machine's own programs: "
        "python -m skyrl_gym.sandbox.machine_image NAME --engine {engine}"
    ),
    r"newuidmap|newgidmap|subuid|subgid|insufficient uids|user namespaces": (
        "rootless containers need the package uidmap and a range for this user in /etc/subuid and /etc/subgid"
    ),
    r"cgroups in hybrid mode": (
        'crun does not know this machine\'s mixed control groups: apt-get install runc, and `runtime = "runc"` below '
        "[engine] in ~/.config/containers/containers.conf"
    ),
}
"""Pattern of an engine's message -> cause and remedy."""

_present: dict[tuple[EngineName, str], bool] = {}
"""Images known to be here -> whether this process pulled them."""
_locks = KeyedLocks()


def run_engine(engine: EngineName, arguments: Sequence[str], timeout: float = CALL_SECONDS) -> bytes:
    """Run a command of the engine and return its output. Raises InfraError with its error output and the remedy."""
    try:
        ended = subprocess.run(
            [engine, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
    except FileNotFoundError:
        raise InfraError(f"the {engine} command is not installed (apt-get install {PACKAGES[engine]})") from None
    except PermissionError as error:
        raise InfraError(f"the {engine} command cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise InfraError(f"{engine} {arguments[0]} did not end within {timeout:g} s") from None
    if ended.returncode != 0:
        said = ended.stderr.decode(errors="replace").strip()
        raise InfraError(f"{engine} {arguments[0]} failed: {said}{find_remedy(engine, said)}")
    return ended.stdout


PACKAGES: dict[EngineName, str] = {"docker": "docker.io", "podman": "podman uidmap"}


def find_remedy(engine: EngineName, said: str) -> str:
    """Return the cause and the remedy of an engine's message, in brackets; empty for one that is not known."""
    for pattern, remedy in REMEDIES.items():
        if re.search(pattern, said, re.IGNORECASE | re.DOTALL):
            return f" ({remedy.format(engine=engine)})"
    return ""


def check_engine(engine: EngineName) -> None:
    """Raises InfraError if the engine does not answer."""
    run_engine(engine, ["ps", "--quiet", "--filter", "name=none-of-this-name"])


def find_engine() -> EngineName:
    """Return the first engine that answers. Raises InfraError with the reason of each."""
    errors = []
    for engine in get_args(EngineName):
        try:
            check_engine(engine)
        except InfraError as error:
            errors.append(str(error))
        else:
            return engine
    raise InfraError(f"no container engine works on this machine: {'; '.join(errors)}")


def ensure_image(engine: EngineName, image: str, pull: Pull) -> None:
    """Have an image on this machine. Threads that need the same one wait for a single pull.

    Raises:
        InfraError: it is not here and `pull` is `never`, or it cannot be pulled.
    """
    # A lock for each image: a long pull of one does not keep containers of others waiting.
    with _locks[engine, image]:
        was_pulled = _present.get((engine, image))  # None: not known to be here
        if was_pulled or (was_pulled is not None and pull != "always"):
            return
        is_pulled = pull == "always" or not has_image(engine, image)
        if is_pulled:
            if pull == "never":
                raise InfraError(
                    f"{engine} has no image {image!r}, and the pull policy is never: {_explain_pull(engine, image)}"
                )
            run_engine(engine, ["pull", "--quiet", image], timeout=START_SECONDS)
        # After a failure it is not noted, so the next thread in line tries again.
        _present[engine, image] = is_pulled


def forget_image(engine: EngineName, image: str) -> None:
    """Look for the image again at the next start: somebody may have removed it."""
    _present.pop((engine, image), None)


def has_image(engine: EngineName, image: str) -> bool:
    """Raises InfraError if the engine does not answer."""
    try:
        run_engine(engine, ["image", "inspect", "--format", "{{.Id}}", image])
    except InfraError as error:
        if NOT_HERE.search(str(error)):
            return False
        raise
    return True


def _explain_pull(engine: EngineName, image: str) -> str:
    made = f"python -m skyrl_gym.sandbox.machine_image {image} --engine {engine}"
    return f"`{engine} pull {image}`, `{engine} load`, or {made}"
