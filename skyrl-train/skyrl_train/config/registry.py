"""Registries: how a setting such as `policy_loss_type=regular` becomes code, and how users add their own.

A registration is all that the rest of the program knows of an entry: its name, the entry itself (a function or a
class), its requirements (data that validation and the trainer read in place of names) and the dataclass of its own
settings.
Imports no torch and none of the entries: a registry is told the names of the modules that register ours.
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
    """Entries by name, one registry a process. A run looks up its entries once, in the driver, and ships them to its
    workers.

    Args:
        noun: kind of the entries, for error messages ("policy loss").
        requirements: dataclass of requirements; its defaults are those of an entry registered without any.
        providers: names of the modules that register this package's own entries when imported. They are imported at
            the first look-up, so that the registry itself needs none of what they import.
    """

    def __init__(self, noun: str, requirements: Callable[[], Requirements], providers: Sequence[str] = ()):
        self._noun = noun
        self._no_requirements = requirements()
        self._providers = tuple(providers)
        self._registrations: dict[str, Registration[Entry, Requirements]] = {}

    def register(
        self, name: str, entry: Entry, *, requires: Requirements | None = None, settings: type[object] | None = None
    ) -> None:
        """Register an entry. Raises ValueError if the name is taken: a silent replacement would change other people's
        runs."""
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
        """Remove an entry. Raises ValueError if there is no such name."""
        self.registration(name)
        del self._registrations[name]

    def registration(self, name: str) -> Registration[Entry, Requirements]:
        """Return all that was registered under `name`. Raises ValueError with the known names if there is none."""
        self._load()
        if name not in self._registrations:
            from skyrl_gym.suggestions import did_you_mean  # settings import without the gym

            hint = did_you_mean(name, self.list_available())
            raise ValueError(f"Unknown {self._noun} '{name}': not registered; {hint}")
        return self._registrations[name]

    def get(self, name: str) -> Entry:
        """Return the entry. Raises ValueError with the known names if there is none."""
        return self.registration(name).entry

    def requirements(self, name: str) -> Requirements:
        """Return the entry's requirements; those of an entry registered without any where `name` is not known."""
        return self.registration(name).requires if name in self else self._no_requirements

    def list_available(self) -> list[str]:
        return sorted(self.registrations())

    def registrations(self) -> dict[str, Registration[Entry, Requirements]]:
        """Return all registrations by name, in the order in which they were made."""
        self._load()
        return dict(self._registrations)

    def decorator(
        self, name: str, *, requires: Requirements | None = None, settings: type[object] | None = None
    ) -> Callable[[AnyEntry], AnyEntry]:
        """`register` as a decorator, which leaves the entry as it is."""

        def keep(entry: AnyEntry) -> AnyEntry:
            self.register(name, entry, requires=requires, settings=settings)  # type: ignore[arg-type]
            return entry

        return keep

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._registrations

    def _load(self) -> None:
        # Emptied first: a provider registers while it is imported, and so comes here again.
        providers, self._providers = self._providers, ()
        try:
            for module in providers:
                import_module(module)
        except BaseException:  # also an interrupt: the next look-up must import them again
            self._providers = providers
            raise
