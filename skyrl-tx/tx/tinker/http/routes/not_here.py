"""Endpoints that only the hosted service has, refused with the reason: a 404 would look like a wrong address."""

from fastapi import APIRouter, Response

from tx.tinker.http.replies import build_problem

router = APIRouter(include_in_schema=False)

_WHY = {
    ("POST", "/auth/token"): "API keys are used directly; tokens are not issued",
    ("POST", "/cancel_future"): "requests cannot be cancelled individually; ending a session cancels its requests",
    ("POST", "/retrieve_futures"): "poll /api/v1/retrieve_future for each result",
    ("POST", "/create_custom_loss"): "custom losses are computed by the client (forward_backward_custom)",
    ("POST", "/join_sampling_session"): "clients can count tokens themselves",
    ("POST", "/copy_weights"): "load the checkpoint into a new model and save it",
    ("POST", "/sessions/search"): "list sessions with GET /api/v1/sessions",
    ("PUT", "/sessions/{session_id}/project"): "projects are not supported",
    ("GET", "/sessions/{session_id}/trace_export"): "traces are not recorded",
    ("GET", "/audit"): "audit logs are not supported; see /metrics and the log",
    ("GET", "/billing/usage/events"): "billing is not supported",
    ("GET", "/billing/usage/checkpoints/current"): "billing is not supported",
}


def _add(method: str, path: str, why: str) -> None:
    async def not_here() -> Response:
        return build_problem(400, f"this server does not have {path.lstrip('/')}: {why}")

    router.add_api_route(path, not_here, methods=[method])


for (_method, _path), _text in _WHY.items():
    _add(_method, _path, _text)
