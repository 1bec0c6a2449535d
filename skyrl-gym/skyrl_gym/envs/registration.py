"""Environments by name: `register`, `make`, `spec`. Each process has its own registry.

An installed package adds its environments to every process by an entry point, without anyone registering them:

    [project.entry-points."skyrl_gym.envs"]
    my_env = "my_package.my_module:MyEnv"

Text of the form "package.module:Class" is an id that needs no registration.
"""

import threading
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import get_type_hints

from skyrl_gym import error
from skyrl_gym.core import Env, EnvCreator, EnvSpec, load_env_creator
from skyrl_gym.suggestions import did_you_mean

__all__ = [
    "EnvCreator",
    "EnvSpec",
    "deregister",
    "env_class_of",
    "load_env_creator",
    "make",
    "pprint_registry",
    "register",
    "register_installed",
    "registry",
    "spec",
]


registry: dict[str, EnvSpec] = {}
# Held while an id is checked and written; look-ups of a dict are atomic and take no lock.
_registry_lock = threading.Lock()


def register(
    id: str, entry_point: EnvCreator | Callable[..., Env] | str | None = None, kwargs: dict[str, object] | None = None
) -> None:
    """Add an environment to the registry of this process.

    Raises:
        AssertionError: no entry point is given.
        RegistrationError: the id is taken.
    """
    assert entry_point is not None, f"register({id!r}) needs an entry_point: a class, a function or 'module:attribute'"
    env_spec = EnvSpec(id=id, entry_point=entry_point, kwargs=dict(kwargs or {}))
    with _registry_lock:
        _check_spec_register(env_spec)
        registry[id] = env_spec


def _check_spec_register(env_spec: EnvSpec) -> None:
    if env_spec.id in registry:
        raise error.RegistrationError(
            f"env {env_spec.id!r} is already registered (entry point {registry[env_spec.id].entry_point}); "
            f"choose another id or deregister it first"
        )


ENTRY_POINT_GROUP = "skyrl_gym.envs"


def register_installed() -> None:
    """Register the environments that installed packages declare, without importing them; `make` does.

    An id that is already registered is kept, with a warning that names both.
    """
    # Only the declarations are read: importing the packages could take seconds, or fail.
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(id=entry_point.name, entry_point=entry_point.value)
        except error.RegistrationError as clash:
            package = entry_point.dist.name if entry_point.dist else "an installed package"
            warnings.warn(f"{package} declares env {entry_point.value!r}, which is ignored: {clash}", stacklevel=2)


def deregister(id: str) -> None:
    """Remove an environment. Raises `Error` for an unknown id."""
    with _registry_lock:
        _find_spec(id)
        del registry[id]


def spec(env_id: str) -> EnvSpec:
    """Return the spec of an id, registered or of the form "package.module:Class".

    Raises:
        Error: unknown id; the text names the nearest ids, or the missing module or attribute.
    """
    return _find_spec(env_id)


def _find_spec(env_id: str) -> EnvSpec:
    found = registry.get(env_id)
    if found is not None:
        return found
    # An id with a colon names a class, which needs no registration.
    if isinstance(env_id, str) and ":" in env_id:
        return _make_spec_from_entry_point(env_id)
    hint = did_you_mean(env_id, sorted(registry), count=3)
    raise error.Error(f"No registered env with id: {env_id}; {hint}")


def _make_spec_from_entry_point(entry_point: str) -> EnvSpec:
    """Make a spec for "package.module:Class", imported to check that it exists. Raises Error."""
    try:
        load_env_creator(entry_point)
    except (ImportError, AttributeError, ValueError) as failure:
        raise error.Error(
            f"No registered env with id: {entry_point}; read as 'package.module:Class' it fails: {failure}"
        ) from failure
    return EnvSpec(id=entry_point, entry_point=entry_point)


def env_class_of(env_spec: EnvSpec) -> type[Env] | None:
    """Return the class of the environments that a spec makes; for a factory function, its return annotation, or
    None.
    """
    if env_spec.entry_point is None:
        raise error.Error(f"{env_spec.id} is registered without an entry point")
    creator = load_env_creator(env_spec.entry_point)
    if not isinstance(creator, type):
        # A factory function tells its class by its return annotation, without being called.
        creator = get_type_hints(getattr(creator, "func", creator)).get("return")  # also of a functools.partial
    return creator if isinstance(creator, type) and issubclass(creator, Env) else None


def make(id: str | EnvSpec, **kwargs: object) -> Env:
    """Create an environment from an id or a spec; see `EnvSpec.make`. Raises Error if the id is unknown."""
    env_spec = id if isinstance(id, EnvSpec) else _find_spec(id)
    return env_spec.make(**kwargs)


def pprint_registry(
    print_registry: dict[str, EnvSpec] = registry, *, num_cols: int = 3, disable_print: bool = False
) -> str | None:
    """Print the registered ids in columns, or return the text if `disable_print`."""
    ids = sorted(print_registry)
    width = max(map(len, ids), default=0) + 2
    rows = [ids[start : start + num_cols] for start in range(0, len(ids), num_cols)]
    lines = ["".join(env_id.ljust(width) for env_id in row).rstrip() for row in rows]
    text = "\n".join(lines) if lines else "No environments registered."
    if disable_print:
        return text
    print(text)
    return None
