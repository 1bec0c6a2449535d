"""A new read-only endpoint is an answer, a method of the service and a route; keys and its documentation follow."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import Request, Response

from tx.tinker.http import responses
from tx.tinker.http.openapi import describe_route
from tx.tinker.http.replies import to_json_response
from tx.tinker.http.routes import server
from tx.tinker.http.scope import get_service


class NumberOfModels(responses.ResponseBody):
    """Would be in `http/responses.py`."""

    num_models: int


def number_of_models(service: Any) -> dict[str, int]:
    """Would be a method of the service."""
    return {"num_models": len(service.capabilities()["supported_models"])}


@pytest.fixture
def endpoint() -> Iterator[None]:
    """Would be in `http/routes/server.py`."""
    before = list(server.router.routes)

    @server.router.get("/number_of_models", **describe_route(NumberOfModels))
    async def route(request: Request) -> Response:
        return to_json_response(number_of_models(get_service(request)))

    yield
    server.router.routes[:] = before


@pytest.mark.usefixtures("endpoint")
async def test_new_endpoint_accepts_key_and_is_documented(served: Any):
    anna, nobody = await served("anna"), await served("nobody")
    answer = await anna.get("/api/v1/number_of_models")
    assert NumberOfModels.model_validate_json(answer.content).num_models >= 1
    assert (await nobody.get("/api/v1/number_of_models")).status_code == 401
    page = (await anna.get("/openapi.json")).json()
    assert page["paths"]["/api/v1/number_of_models"]["get"]["responses"]["200"]["content"]["application/json"]
