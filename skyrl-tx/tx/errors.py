"""Errors of settings and requests."""


class ConfigError(Exception):
    """Invalid setting, detected before anything starts. Names the setting, the value, the rule and the likely fix."""


class RequestError(Exception):
    """Request that is refused immediately, without effect, and not retried by clients.

    Args:
        message: field, value, rule, likely fix
        status: 400 bad value, 401 no key, 404 not found, 413 too large, 422 invalid schema, 410 expired. Never 409 or
        5xx, which clients retry for minutes.
    """

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Busy(Exception):
    """Overload: the request may be retried later (429).

    Args:
        retry_after_seconds: suggested delay
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
