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
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for the person who wrote the request.
        param: the field of the request that is wrong.
        code: a word that programs can compare with.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """The JSON that clients read."""
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ContextLengthExceeded(ApiError):
    """The prompt leaves no room for a token of an answer."""

    def __init__(self, num_tokens: int, max_model_len: int, param: str):
        message = (
            f"This model's maximum context length is {max_model_len} tokens, prompt and answer together; your prompt "
            f"has {num_tokens} tokens. Please shorten it."
        )
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request cannot be answered as it is (400)."""
    return ApiError(400, message, param=param, code=code)


def too_busy(num_under_way: int, limit: int) -> ApiError:
    """The request would exceed the answers that may be under way; clients of OpenAI's send it again by themselves."""
    return ApiError(
        429,
        f"{num_under_way} answers are under way, of at most {limit} (generator.http_endpoint_max_requests); send the "
        "request again later",
        code="too_many_requests",
    )


def timed_out() -> ApiError:
    """The deadline of a request is over."""
    return ApiError(504, "the engine did not answer in time (generator.request_timeout_seconds)", code="timeout")


def error_of_engine(error: Exception) -> ApiError:
    """Translate an engine's error to one of the endpoint."""
    if isinstance(error, UnsupportedByEngine):
        return refused(f"the engine cannot do this: {error}", code="unsupported_by_engine")
    if isinstance(error, WorkerError | RolloutError):
        logger.error(f"the endpoint's engine failed: {error}")  # the end of its log is for us, not for clients
        return ApiError(503, "the engine failed or is not reachable; try again later", code="engine_unavailable")
    if isinstance(error, TimeoutError):
        return timed_out()
    if isinstance(error, ValueError) and not isinstance(error, SkyRLError):
        return refused(str(error))
    return error_of_ours(error)


def error_of_ours(error: Exception) -> ApiError:
    """A bug, or what nobody thought of: the log has the trace, the client does not."""
    if isinstance(error, ApiError):
        return error
    logger.opt(exception=error).error("the endpoint failed at a request")
    return ApiError(500, f"the server failed at this request ({type(error).__name__}); its log says more")
