"""Errors of the endpoint in Anthropic's format."""

from skyrl_train.endpoint.errors import ApiError, ContextLengthExceeded
from skyrl_train.types import JsonObject

_OVERLOADED = 529
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def get_status(error: ApiError) -> int:
    """Return the HTTP status: Anthropic's API uses 529 instead of 503."""
    return _OVERLOADED if error.status == 503 else error.status


def build_error_body(error: ApiError, request_id: str) -> JsonObject:
    """Build the JSON error body. Agents that shorten long conversations match the text `prompt is too long`."""
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_model_len - 1} maximum"
    kind = _TYPE_OF_STATUS.get(get_status(error), "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
