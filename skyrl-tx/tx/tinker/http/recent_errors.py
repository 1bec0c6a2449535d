"""The last errors that nobody foresaw, for the status page. The log has their stories."""

import time
from collections import deque


class RecentErrors:
    def __init__(self, at_most: int = 20):
        self._errors: deque[tuple[float, str]] = deque(maxlen=at_most)

    def note(self, text: str) -> None:
        self._errors.append((time.time(), text))

    def rows(self) -> list[dict[str, str]]:
        """The latest first."""
        stamp = "%Y-%m-%d %H:%M:%S"
        return [{"time": time.strftime(stamp, time.gmtime(at)), "error": text} for at, text in reversed(self._errors)]
