"""Base class and specification of environments, independent of the observation type, the registry and the trainer."""

import copy
import importlib
import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, Self, TypedDict, TypeVar

from skyrl_gym.error import Error

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class EnvStepOutput(TypedDict, Generic[ObsType]):
    """Output of one step; a plain dict at run time."""

    observations: ObsType
    reward: float
    done: bool
    metadata: Mapping[str, object]


class Env(Generic[ObsType, ActType]):
    """Environment that runs one episode at a time: `init`, then `step` until done, then `close`.

    A trainer drives many environments from many threads, each of them by one thread at a time: instances share no
    mutable state, and none uses signals.
    """

    spec: "EnvSpec | None" = None
    """Registration that this instance was made from; set by `skyrl_gym.make`."""

    def init(self, *args: Any, **kwargs: Any) -> tuple[ObsType, dict[str, object]]:
        """Start an episode. Returns the first observation and a dict of information."""
        raise NotImplementedError(f"{type(self).__name__} must define init")

    def step(self, action: ActType) -> EnvStepOutput[ObsType]:
        """Take one action."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    def close(self) -> None:
        """Release resources. May be called more than once."""

    def __str__(self) -> str:
        return f"Env({type(self).__name__})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        """Create an environment. `kwargs` override the spec's, which stays unchanged.

        Exceptions of the constructor propagate; a TypeError is raised again with the id and the arguments in its text.

        Raises:
            Error: the spec has no entry point.
            TypeError: the arguments do not fit, or the entry point returns no `Env`.
        """
        if self.entry_point is None:
            raise Error(f"{self.id} has no entry point, so it cannot be created")
        # A copy: an environment that modifies its arguments must not modify the registration.
        merged = copy.deepcopy(self.kwargs) | kwargs
        creator = load_env_creator(self.entry_point)
        try:
            env = creator(**merged)
        except TypeError as failure:
            # The same class, since callers catch TypeError and its subclasses; the text names the environment.
            raise type(failure)(
                f"{failure} (while making env {self.id!r} with arguments {reprlib.repr(merged)})"
            ) from failure
        if not isinstance(env, Env):
            raise TypeError(
                f"entry point of env {self.id!r} must create a skyrl_gym.Env; it created a {type(env).__name__}"
            )
        # The spec of this instance recreates it, also in another process.
        env.spec = EnvSpec(id=self.id, entry_point=self.entry_point, kwargs=merged)
        return env

    def to_json(self) -> str:
        """Serialize to JSON. Raises ValueError if a field is a callable: the entry point must be given as text."""
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
        """Parse a spec from JSON. Raises ValueError if the text is not a spec."""
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


def load_env_creator(entry_point: EnvCreator | Callable[..., Env] | str) -> EnvCreator | Callable[..., Env]:
    """Return the class or function of an entry point, imported if it is given as "package.module:attribute".

    Raises:
        ValueError: the text is not of that form.
        ImportError, AttributeError: the module or attribute does not exist.
    """
    if callable(entry_point):
        return entry_point
    module_name, separator, attribute = entry_point.partition(":")
    if not (module_name and separator and attribute) or ":" in attribute:
        raise ValueError(f"entry point {entry_point!r} must have the form 'package.module:attribute'")
    return getattr(importlib.import_module(module_name), attribute)
