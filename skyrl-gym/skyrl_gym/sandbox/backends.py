"""Selection of the sandbox that works on this machine."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.base import Limits, Sandbox
from skyrl_gym.sandbox.docker import DockerSandbox
from skyrl_gym.sandbox.local import LocalSandbox
from skyrl_gym.sandbox.process import ProcessSandbox

Kind = Literal["auto", "local", "docker", "process"]
KIND_VARIABLE = "SKYRL_GYM_SANDBOX"
PROBE_LIMITS = Limits(wall_seconds=30.0)

_found: dict[str, InfraError | None] = {}
_finding = threading.Lock()


def make_sandbox(
    kind: Kind = "auto", *, limits: Limits | None = None, visible: Mapping[str, str] | None = None
) -> Sandbox:
    """Return a sandbox, not started.

    Args:
        kind: "local" is bubblewrap, "docker" a container; "auto" the first of these that works here, or what the
            environment variable SKYRL_GYM_SANDBOX names. "process" has limits but neither a file system nor a network
            of its own: for code one trusts, and never chosen automatically.
        limits: of each command, unless `exec` or `popen` is given others.
        visible: path inside -> path on this machine of what commands can see (not change) besides, such as another
            Python's folder or the socket of a server; "local" only ("process" sees everything anyway).

    Raises:
        InfraError: that kind does not work on this machine; the text says why and what to install.
    """
    if kind == "auto":
        kind = os.environ.get(KIND_VARIABLE, "auto")  # pyright: ignore[reportAssignmentType]
    if kind not in get_args(Kind):
        raise ValueError(f"a sandbox is one of {', '.join(get_args(Kind))}; got {kind!r}")
    if visible and kind not in ("local", "process"):
        raise ValueError(f"visible needs the sandbox 'local' or 'process'; got {kind!r}")
    if kind != "auto":
        if (error := _probe(kind)) is not None:
            raise InfraError(str(error)) from error
        return LocalSandbox(limits, visible) if kind == "local" else BACKENDS[kind](limits)
    errors = {}
    for kind in ("local", "docker"):
        if (error := _probe(kind)) is None:
            return BACKENDS[kind](limits)
        errors[kind] = error
    raise InfraError(
        "no sandbox for untrusted code works on this machine: "
        + "; ".join(f"{kind}: {error}" for kind, error in errors.items())
        + ". Install bubblewrap (apt-get install bubblewrap), start Docker, or, for code that you trust only, "
        f"choose the one without isolation: {KIND_VARIABLE}=process"
    )


def _probe(kind: str) -> InfraError | None:
    """Return the reason why that kind does not work here; None if it does. Tried once per process."""
    # Held during the trial: threads that ask meanwhile wait for its result instead of trying themselves.
    with _finding:
        if kind not in _found:
            _found[kind] = _try(BACKENDS[kind])
        return _found[kind]


def _try(backend: Callable[..., Sandbox]) -> InfraError | None:
    try:
        with backend(PROBE_LIMITS) as sandbox:
            # A start alone proves little: kernels without user namespaces fail at the first command.
            result = sandbox.exec([sandbox.python, "-I", "-S", "-c", "print(6 * 7)"])
    except InfraError as error:
        return error
    if result.stdout != "42\n":
        return InfraError(
            f"Python does not run in it: {result.outcome}, {result.returncode}, {result.stderr.strip()!r}"
        )
    return None


BACKENDS: dict[str, Callable[..., Sandbox]] = {
    "local": LocalSandbox,
    "docker": DockerSandbox,
    "process": ProcessSandbox,
}
