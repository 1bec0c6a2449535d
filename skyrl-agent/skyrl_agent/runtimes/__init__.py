"""Runtimes: machines in which agents work. `make_runtime` builds a `Runtime`."""

import os
from dataclasses import replace

from skyrl_agent.config.task_file import RuntimeSection
from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime, RuntimeSpec, Snapshot
from skyrl_agent.runtimes.host import HostRuntime
from skyrl_gym.sandbox.environment import check_variables

__all__ = [
    "ExecResult",
    "Limits",
    "Runtime",
    "RuntimeSpec",
    "Snapshot",
    "check_runtime_section",
    "make_runtime",
    "merge_spec",
    "probe_runtime",
]


CONTAINER_SETTINGS = ("pull", "user", "read_only", "cpus")


def make_runtime(spec: RuntimeSpec) -> Runtime:
    """Build a runtime without starting it. Kind `auto` selects a server if `url` is set, a container if `image` is set,
    else the choice of `skyrl_gym.sandbox.make_sandbox`: bubblewrap, or a container if that does not work.

    Raises:
        ConfigError: kind `remote` has no url.
    """
    if spec.kind == "remote" or (spec.kind == "auto" and spec.url):
        if not spec.url:
            raise ConfigError("runtime.kind is 'remote', so runtime.url must be the address of a runtime server")
        from skyrl_agent.runtimes.remote import RemoteRuntime

        return RemoteRuntime(spec)
    return HostRuntime(spec)


def check_runtime_section(section: RuntimeSection) -> None:
    """Raises ConfigError if no task's runtime could be made with it."""
    make_runtime(merge_spec(section, RuntimeSpec()))


async def probe_runtime(spec: RuntimeSpec) -> None:
    """Check within seconds that runtimes of a kind can be had: a server answers, a daemon runs, a sandbox works.

    Raises:
        ConfigError: as `make_runtime`.
        InfraError: they cannot.
    """
    runtime = make_runtime(spec)
    try:
        await runtime.probe()
    except InfraError as error:
        named = f"runtime.url={spec.url}" if spec.url else f"runtime.kind={spec.kind}"
        raise InfraError(f"{named}: {error}") from error


def merge_spec(section: RuntimeSection, spec: RuntimeSpec) -> RuntimeSpec:
    """Merge a task's runtime specification with the task file's `runtime`, which takes precedence.

    Raises:
        ConfigError: `token_env` names a variable that is not set; a url or an image that the kind does not read; a
            variable that no command can be given.
    """
    try:
        check_variables(spec.env)
    except ValueError as error:
        raise ConfigError(f"the task's runtime: {error}") from None
    if section.url is not None and section.kind not in (None, "auto", "remote"):
        raise ConfigError(
            f"runtime.url={section.url!r} has an effect only with kind remote; runtime.kind is "
            f"{section.kind}: remove one of them"
        )
    of_containers = {name: value for name in CONTAINER_SETTINGS if (value := getattr(section, name)) is not None}
    kind = section.kind or ("remote" if section.url else spec.kind)
    if of_containers and kind in ("local", "remote"):
        named = ", ".join(f"runtime.{name}={value}" for name, value in of_containers.items())
        raise ConfigError(
            f"{named} has an effect only for containers on this machine; runtime.kind is {kind}: remove it"
        )
    if kind == "local" and (image := section.image or spec.image):
        source = "runtime.image" if section.image else "the task's image"
        raise ConfigError(
            f"{source}={image} has an effect only for containers; runtime.kind is local: set it to auto, docker or "
            "podman, or remove the image"
        )
    given = {name: value for name in ("kind", "image", "url", "lease_seconds") if (value := getattr(section, name))}
    given |= of_containers
    if section.token_env is not None:
        given["token"] = os.environ.get(section.token_env)
        if not given["token"]:
            raise ConfigError(
                f"runtime.token_env: the environment variable {section.token_env} is not set; set it to the token of "
                "the runtime server"
            )
    limits = spec.limits
    if (seconds := section.command_timeout_seconds) is not None:
        limits = replace(limits, wall_seconds=seconds, cpu_seconds=seconds)
    if section.memory_bytes is not None:
        limits = replace(limits, memory_bytes=section.memory_bytes)
    return replace(spec, limits=limits, **given)
