"""Environments by name: `register`, `make`, `spec`. Each process has a registry of its own.

An installed package adds its environments to every process by an entry point, without anyone registering them:

    [project.entry-points."skyrl_gym.envs"]
    my_env = "my_package.my_module:MyEnv"

Text of the form "package.module:Class" is an id that needs no registration.
"""

import copy
import importlib
import json
import reprlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol, get_type_hints

from skyrl_gym import error
from skyrl_gym.core import Env
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


class EnvCreator(Protocol):
    """An `Env` class, or a function that returns one."""

    def __call__(self, **kwargs: object) -> Env: ...


@dataclass
class EnvSpec:
    """Specification of an environment: its id, its entry point, and the keyword arguments it is made with."""

    id: str
    entry_point: EnvCreator | Callable[..., Env] | str | None = None
    """A class or function, or the text "package.module:attribute"."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.id

    def make(self, **kwargs: object) -> Env:
        return make(self, **kwargs)

    def to_json(self) -> str:
        """Raises ValueError if a field is a callable: only an entry point given as text survives the trip."""
        self._check_can_jsonify(self)
        fields = asdict(self)
        del fields["name"]
        return json.dumps(fields)

    @staticmethod
    def _check_can_jsonify(env_spec: "EnvSpec") -> None:
        for key, value in vars(env_spec).items():
            if callable(value):
                raise ValueError(
                    f"{env_spec.id}: {key} is a callable, which JSON cannot hold; register it as 'module:attribute'"
                )

    @staticmethod
    def from_json(json_env_spec: str) -> "EnvSpec":
        """Raises ValueError if the text is not a spec."""
        try:
            return EnvSpec(**json.loads(json_env_spec))
        except (TypeError, json.JSONDecodeError) as failure:
            raise ValueError(f"not an environment spec: {json_env_spec!r}") from failure

    def pprint(self, disable_print: bool = False, include_entry_points: bool = False) -> str | None:
        """Print the spec, or return the text if `disable_print`."""
        text = f"id={self.id}"
        if include_entry_points:
            text += f"\nentry_point={self.entry_point}"
        if disable_print:
            return text
        print(text)
        return None


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
    """Register the environments that installed packages declare. Imports none of them: that is left to `make`.

    An id that is taken already keeps its meaning, with a warning that names both.
    """
    # Only the declarations are read: importing the packages could take seconds, or fail.
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(id=entry_point.name, entry_point=entry_point.value)
        except error.RegistrationError as clash:
            package = entry_point.dist.name if entry_point.dist else "an installed package"
            warnings.warn(f"{package} declares env {entry_point.value!r}, which is left out: {clash}", stacklevel=2)


def deregister(id: str) -> None:
    """Remove an environment. Raises `Error` if there is none of that id."""
    with _registry_lock:
        _find_spec(id)
        del registry[id]


def spec(env_id: str) -> EnvSpec:
    """Return the spec of an id, registered or of the form "package.module:Class".

    Raises:
        Error: there is none; the text names the nearest ids, or what is missing of the module.
    """
    return _find_spec(env_id)


def _find_spec(env_id: str) -> EnvSpec:
    found = registry.get(env_id)
    if found is not None:
        return found
    # An id with a colon names a class, which needs no registration.
    if isinstance(env_id, str) and ":" in env_id:
        return _spec_of_entry_point(env_id)
    hint = did_you_mean(env_id, sorted(registry), count=3)
    raise error.Error(f"No registered env with id: {env_id}; {hint}")


def _spec_of_entry_point(entry_point: str) -> EnvSpec:
    """Return a spec for "package.module:Class", which is imported to prove that it is there. Raises Error."""
    try:
        load_env_creator(entry_point)
    except (ImportError, AttributeError, ValueError) as failure:
        raise error.Error(
            f"No registered env with id: {entry_point}; read as 'package.module:Class' it fails: {failure}"
        ) from failure
    return EnvSpec(id=entry_point, entry_point=entry_point)


def load_env_creator(entry_point: EnvCreator | Callable[..., Env] | str) -> EnvCreator | Callable[..., Env]:
    """Return the class or function behind an entry point, imported if it is given as "package.module:attribute".

    Raises:
        ValueError: the text is not of that form.
        ImportError, AttributeError: there is no such module or attribute.
    """
    if callable(entry_point):
        return entry_point
    module_name, separator, attribute = entry_point.partition(":")
    if not (module_name and separator and attribute) or ":" in attribute:
        raise ValueError(f"entry point {entry_point!r} must read 'package.module:attribute'")
    return getattr(importlib.import_module(module_name), attribute)


def env_class_of(env_spec: EnvSpec) -> type[Env] | None:
    """Return the class of the environments that a spec makes; for a factory function the one it is annotated to return.

    None if a factory does not say.
    """
    if env_spec.entry_point is None:
        raise error.Error(f"{env_spec.id} is registered without an entry point")
    creator = load_env_creator(env_spec.entry_point)
    if not isinstance(creator, type):
        # A factory function tells its class by its return annotation, without being called.
        creator = get_type_hints(getattr(creator, "func", creator)).get("return")  # also of a functools.partial
    return creator if isinstance(creator, type) and issubclass(creator, Env) else None


def make(id: str | EnvSpec, **kwargs: object) -> Env:
    """Make an environment by its id or spec.

    `kwargs` win over those of the registration. Whatever the constructor raises reaches the caller; a TypeError is
    raised again with the id and the arguments in its text.

    Raises:
        Error: unknown id, or a spec without an entry point.
        TypeError: the arguments do not fit, or what was made is not an `Env`.
    """
    env_spec = id if isinstance(id, EnvSpec) else _find_spec(id)
    if env_spec.entry_point is None:
        raise error.Error(f"{env_spec.id} has no entry point, so it cannot be made")
    # A copy: an environment that changes its arguments must not change the registration.
    merged = copy.deepcopy(env_spec.kwargs) | kwargs
    creator = load_env_creator(env_spec.entry_point)
    try:
        env = creator(**merged)
    except TypeError as failure:
        # The same class, since callers catch TypeError and its subclasses; the text names the environment.
        raise type(failure)(
            f"{failure} (while making env {env_spec.id!r} with arguments {reprlib.repr(merged)})"
        ) from failure
    if not isinstance(env, Env):
        raise TypeError(f"entry point of env {env_spec.id!r} must make a skyrl_gym.Env; it made a {type(env).__name__}")
    # Of this instance: with it, the environment can be made again elsewhere.
    env.spec = EnvSpec(id=env_spec.id, entry_point=env_spec.entry_point, kwargs=merged)
    return env


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
