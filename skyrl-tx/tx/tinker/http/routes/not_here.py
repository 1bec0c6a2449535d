"""Endpoints that only the hosted service has, refused with the reason: a 404 would look like a wrong address."""

from fastapi import APIRouter, Response

from tx.tinker.http.replies import build_problem

router = APIRouter(include_in_schema=False)

_WHY = {
    ("POST", "/auth/token"): "API keys are used as they are, there are no tokens to get",
    ("POST", "/cancel_future"): "requests cannot be cancelled; a session that ends takes its own along",
    ("POST", "/retrieve_futures"): "poll /api/v1/retrieve_future for each result",
    ("POST", "/create_custom_loss"): "custom losses are computed by the client (forward_backward_custom)",
    ("POST", "/join_sampling_session"): "clients may count on their own",
    ("POST", "/copy_weights"): "load the checkpoint into a new model and save it",
    ("POST", "/sessions/search"): "list sessions with GET /api/v1/sessions",
    ("PUT", "/sessions/{session_id}/project"): "there are no projects",
    ("GET", "/sessions/{session_id}/trace_export"): "traces are not recorded",
    ("GET", "/audit"): "there is no audit log; /metrics and the log tell what happens",
    ("GET", "/billing/usage/events"): "nothing is billed",
    ("GET", "/billing/usage/checkpoints/current"): "nothing is billed",
}


def _add(method: str, path: str, why: str) -> None:
    async def not_here() -> Response:
        return build_problem(400, f"this server does not have {path.lstrip('/')}: {why}")

    router.add_api_route(path, not_here, methods=[method])


for (_method, _path), _text in _WHY.items():
    _add(_method, _path, _text)
