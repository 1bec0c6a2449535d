"""Errors of the endpoint in OpenAI's format. Clients choose their exception by the status."""

from loguru import logger

from skyrl_train.errors import RolloutError, SkyRLError, UnsupportedByEngine, WorkerError

_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Error response.

    Args:
        status: HTTP status.
        message: for the person who wrote the request.
        param: the field of the request that is wrong.
        code: machine-readable error code.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """Return the JSON error body."""
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ContextLengthExceeded(ApiError):
    """The prompt leaves no room for a response token."""

    def __init__(self, num_tokens: int, max_model_len: int, param: str):
        message = (
            f"This model's maximum context length is {max_model_len} tokens, including prompt and completion; your "
            f"prompt has {num_tokens} tokens. Please shorten it."
        )
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


def build_refusal(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Build the error of an invalid request (400)."""
    return ApiError(400, message, param=param, code=code)


def build_too_busy_error(num_under_way: int, limit: int) -> ApiError:
    """Build the error of a request above the limit of responses in flight; OpenAI's clients retry it automatically."""
    return ApiError(
        429,
        f"{num_under_way} completions are in flight, the limit is {limit} (generator.http_endpoint_max_requests); "
        "retry later",
        code="too_many_requests",
    )


def build_timeout_error() -> ApiError:
    """Build the error of a request past its deadline."""
    return ApiError(504, "the engine did not respond in time (generator.request_timeout_seconds)", code="timeout")


def convert_engine_error(error: Exception) -> ApiError:
    """Convert an engine error to an ApiError."""
    if isinstance(error, UnsupportedByEngine):
        return build_refusal(f"not supported by the engine: {error}", code="unsupported_by_engine")
    if isinstance(error, WorkerError | RolloutError):
        logger.error(f"the endpoint's engine failed: {error}")  # the end of the log is internal
        return ApiError(503, "the engine failed or is not reachable; retry later", code="engine_unavailable")
    if isinstance(error, TimeoutError):
        return build_timeout_error()
    if isinstance(error, ValueError) and not isinstance(error, SkyRLError):
        return build_refusal(str(error))
    return build_internal_error(error)


def build_internal_error(error: Exception) -> ApiError:
    """Build the response to an unexpected exception. The traceback is logged, not sent to the client."""
    if isinstance(error, ApiError):
        return error
    logger.opt(exception=error).error("the endpoint failed to handle a request")
    return ApiError(500, f"internal server error ({type(error).__name__}); see the server's log")
