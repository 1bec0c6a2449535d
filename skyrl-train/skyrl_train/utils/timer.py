"""Durations of the phases of a step."""

import time
from types import TracebackType
from typing import Self

from loguru import logger

from skyrl_gym.waits import waiting


class Timer:
    """Context manager that adds the seconds of its (async) `with` block to `update_dict[name]`, even if the block
    raises, and records the phase among the waits of this process.
    """

    def __init__(self, name: str, update_dict: dict[str, float] | None = None):
        self.name = name
        self.update_dict = update_dict
        self._start = 0.0
        self._phase = waiting(f"phase {name}")

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._phase.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._phase.__exit__(kind, error, traceback)
        seconds = time.perf_counter() - self._start
        if self.update_dict is not None:
            self.update_dict[self.name] = self.update_dict.get(self.name, 0.0) + seconds
        logger.debug(f"{self.name}: {seconds:.3f} s")

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)
