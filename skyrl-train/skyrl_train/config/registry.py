"""Registries that map a setting such as `policy_loss_type=regular` to code, and that users extend.

A registration is all that other modules know of an entry: its name, the entry itself (a function or a class), its
requirements (data that validation and the trainer read instead of names) and the dataclass of its settings. Imports
neither torch nor the entries: a registry gets the names of the modules that register the built-in ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")
AnyEntry = TypeVar("AnyEntry")
Requirements = TypeVar("Requirements")


@dataclass(frozen=True, kw_only=True)
class Registration(Generic[Entry, Requirements]):
    """Entry of a registry."""

    name: str

    entry: Entry
    """The function, or the class or function that builds the object."""

    requires: Requirements
    """Requirements on a run, and capabilities: plain data."""

    settings: type[Any] | None = None
    """Dataclass of the entry's own settings, every field with a default; None: it has none."""

    is_builtin: bool = False
    """True for registrations of this package."""


class Registry(Generic[Entry, Requirements]):
    """Process-wide registry of named entries. A run looks up its entries once, in the driver, and ships them to its
    workers.

    Args:
        noun: kind of the entries, for error messages ("policy loss").
        requirements: dataclass of requirements; its defaults apply to an entry registered without any.
        providers: names of the modules that register the built-in entries when imported. They are imported at the first
            look-up, so that the registry itself needs none of their imports.
    """

    def __init__(self, noun: str, requirements: Callable[[], Requirements], providers: Sequence[str] = ()):
        self._noun = noun
        self._no_requirements = requirements()
        self._providers = tuple(providers)
        self._registrations: dict[str, Registration[Entry, Requirements]] = {}

    def register(
        self, name: str, entry: Entry, *, requires: Requirements | None = None, settings: type[object] | None = None
    ) -> None:
        """Register an entry. Raises ValueError if the name is taken: silent replacement would change other
        users' runs."""
        self._load()
        if name in self._registrations:
            raise ValueError(f"{self._noun} '{name}' is already registered; choose another name or unregister it first")
        self._registrations[name] = Registration(
            name=name,
            entry=entry,
            requires=self._no_requirements if requires is None else requires,
            settings=settings,
            is_builtin=str(getattr(entry, "__module__", "")).startswith("skyrl_train."),
        )

    def unregister(self, name: str) -> None:
        """Remove an entry. Raises ValueError if the name is unknown."""
        self.get_registration(name)
        del self._registrations[name]

    def get_registration(self, name: str) -> Registration[Entry, Requirements]:
        """Return the registration of `name`. Raises ValueError that lists the known names if it is unknown."""
        self._load()
        if name not in self._registrations:
            from skyrl_gym.suggestions import did_you_mean  # settings import without the gym

            hint = did_you_mean(name, self.list_available())
            raise ValueError(f"Unknown {self._noun} '{name}': not registered; {hint}")
        return self._registrations[name]

    def get(self, name: str) -> Entry:
        """Return the entry. Raises ValueError that lists the known names if `name` is unknown."""
        return self.get_registration(name).entry

    def get_requirements(self, name: str) -> Requirements:
        """Return the entry's requirements, or the default requirements if `name` is unknown."""
        return self.get_registration(name).requires if name in self else self._no_requirements

    def list_available(self) -> list[str]:
        return sorted(self.list_registrations())

    def list_registrations(self) -> dict[str, Registration[Entry, Requirements]]:
        """Return all registrations by name, in registration order."""
        self._load()
        return dict(self._registrations)

    def build_decorator(
        self, name: str, *, requires: Requirements | None = None, settings: type[object] | None = None
    ) -> Callable[[AnyEntry], AnyEntry]:
        """Return a decorator that registers a function or class and returns it unchanged."""

        def register_entry(entry: AnyEntry) -> AnyEntry:
            self.register(name, entry, requires=requires, settings=settings)  # type: ignore[arg-type]
            return entry

        return register_entry

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._registrations

    def _load(self) -> None:
        # Cleared first: a provider registers while it is imported, which reenters this function.
        providers, self._providers = self._providers, ()
        try:
            for module in providers:
                import_module(module)
        except BaseException:  # also after an interrupt: the next look-up must import them again
            self._providers = providers
            raise
