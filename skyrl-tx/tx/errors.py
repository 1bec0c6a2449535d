"""Errors of settings and requests."""


class ConfigError(Exception):
    """A setting that cannot be, found before anything starts: its name, the value, the rule, the likely intent."""


class RequestError(Exception):
    """A request that is refused at once: never retried by clients, never acted upon.

    Args:
        message: field, value, rule, likely fix
        status: 400 bad value, 401 no key, 404 no such thing, 413 too large, 422 wrong shape of the request, 410 gone.
            Never 409 or 5xx, which clients try again for minutes.
    """

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Busy(Exception):
    """Too much is under way; the same request is welcome later (429).

    Args:
        retry_after_seconds: when
    """

    def __init__(self, message: str, retry_after_seconds: float):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ModelError(Exception):
    """A request that was accepted and turned out to be impossible while it was computed: the fault is the user's
    (`category` "user") or ours ("server"). It fails this request and no other."""

    def __init__(self, message: str, category: str = "user"):
        super().__init__(message)
        self.category = category
