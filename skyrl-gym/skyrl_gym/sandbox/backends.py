"""Selection of the sandbox that works on this machine."""

import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Literal, get_args

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.base import Limits, Sandbox
from skyrl_gym.sandbox.container import ContainerSandbox
from skyrl_gym.sandbox.container_engine import Pull
from skyrl_gym.sandbox.keyed_locks import KeyedLocks
from skyrl_gym.sandbox.local import LocalSandbox
from skyrl_gym.sandbox.process import ProcessSandbox

Kind = Literal["auto", "local", "docker", "podman", "process"]
WALLED = ("local", "docker", "podman")
"""Kinds for untrusted code, in the order in which they are tried."""
KIND_VARIABLE = "SKYRL_GYM_SANDBOX"
PROBE_LIMITS = Limits(wall_seconds=30.0)

_found: dict[tuple[Kind, str | None, Pull], InfraError | None] = {}
_finding = KeyedLocks()


def make_sandbox(
    kind: Kind = "auto",
    *,
    limits: Limits | None = None,
    visible: Mapping[str, str] | None = None,
    image: str | None = None,
    pull: Pull = "missing",
) -> Sandbox:
    """Create a sandbox, not started.

    Args:
        kind: "local" is bubblewrap, "docker" and "podman" a container; "auto" the first of these that works, or the
            kind in the environment variable SKYRL_GYM_SANDBOX. "process" has limits but no isolated file system or
            network: for trusted code only, never chosen automatically.
        limits: of each command, unless overridden in `exec` or `popen`.
        visible: path inside -> path on the host, of additional read-only files, such as another Python's folder or the
            socket of a server ("process" sees everything).
        image: of a container; default: the environment variable SKYRL_GYM_SANDBOX_IMAGE, or `python:3.12-slim`.
        pull: when that image is pulled.

    Raises:
        InfraError: the kind does not work on this machine; the text names the reason and what to install.
    """
    if kind == "auto":
        kind = os.environ.get(KIND_VARIABLE, "auto")  # pyright: ignore[reportAssignmentType]
    if kind not in get_args(Kind):
        raise ValueError(f"the sandbox must be one of {', '.join(get_args(Kind))}; got {kind!r}")
    if image is not None and kind not in ("docker", "podman"):
        raise ValueError(f"image={image!r} needs the sandbox 'docker' or 'podman'; got {kind!r}")
    make = partial(_make, limits=limits, visible=visible, image=image, pull=pull)
    if kind != "auto":
        if (error := _probe(kind, image, pull)) is not None:
            raise InfraError(str(error)) from error
        return make(kind)
    errors = {}
    for kind in WALLED:
        if (error := _probe(kind, image, pull)) is None:
            return make(kind)
        errors[kind] = error
    raise InfraError(
        "no sandbox for untrusted code works on this machine: "
        + "; ".join(f"{kind}: {error}" for kind, error in errors.items())
        + ". Install bubblewrap (apt-get install bubblewrap), start Docker or install Podman, or, only for trusted "
        f"code, disable isolation: {KIND_VARIABLE}=process"
    )


def _make(
    kind: Kind,
    *,
    limits: Limits | None,
    visible: Mapping[str, str] | None = None,
    image: str | None,
    pull: Pull,
) -> Sandbox:
    if kind == "local":
        return LocalSandbox(limits, visible)
    if kind == "docker" or kind == "podman":
        return ContainerSandbox(limits, visible, engine=kind, image=image, pull=pull)
    return ProcessSandbox(limits)


def _probe(kind: Kind, image: str | None = None, pull: Pull = "missing") -> InfraError | None:
    """Return the reason why a kind does not work here, or None. Tried once per process and image."""
    key = (kind, image, pull)
    # Held during the trial: threads that ask the same meanwhile wait for its result instead of trying themselves.
    with _finding[key]:
        if key not in _found:
            _found[key] = _try(kind, image, pull)
        return _found[key]


def _try(kind: Kind, image: str | None, pull: Pull) -> InfraError | None:
    try:
        with _make(kind, limits=PROBE_LIMITS, image=image, pull=pull) as sandbox:
            # A start alone proves little: kernels without user namespaces fail at the first command.
            result = sandbox.exec([sandbox.python, "-I", "-S", "-c", "print(6 * 7)"])
    except InfraError as error:
        return error
    if result.stdout != "42\n":
        hint = ""
        if "Permission denied" in result.stderr:  # as root, commands run as a user of their own
            hint = f" (make {sys.prefix} readable for others: chmod -R go+rX, and install under umask 022)"
        return InfraError(
            f"Python does not run in it: {result.outcome}, {result.returncode}, {result.stderr.strip()!r}{hint}"
        )
    return None
