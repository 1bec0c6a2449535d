"""OpenAPI description of the server: bodies and responses of each endpoint.

Endpoints read their bodies themselves (`bodies`: limits, threads), so they must be declared to the framework.
"""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from tx.tinker.http.responses import Problem
from tx.tinker.types import LOSSES
from tx.tinker.wire.schemas import Name, Seq

PROTOBUF = "application/x-protobuf"
_COMPONENT = "#/components/schemas/{model}"
_BODIES: set[type[BaseModel]] = set()
_PROBLEMS = {
    400: "An invalid value",
    401: "Missing or unknown API key",
    404: "Not found, or owned by another tenant",
    413: "The body is too large",
    415: "Unsupported content type",
    422: "The request does not match the schema of this endpoint",
    429: "Too many requests in flight; retry after `Retry-After`",
    500: "Internal server error; the server's log has the id",
}
_OF_BODIES = (408, 413, 415)


def describe_route(
    answer: type[BaseModel], body: type[BaseModel] | None = None, *, also: dict[int, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Build keyword arguments of a route.

    Args:
        answer: model of the 200 response
        body: schema of a JSON body; None: no body
        also: further responses by status
    """
    codes = [code for code in _PROBLEMS if body is not None or code not in _OF_BODIES]
    responses: dict[int | str, Any] = {code: {"model": Problem, "description": _PROBLEMS[code]} for code in codes}
    if body is not None:
        responses[408] = {"model": Problem, "description": "The body did not arrive in time"}
    extra: dict[str, Any] = kwargs.pop("openapi_extra", {})
    if body is not None and not extra:
        extra = {"requestBody": describe_json_body(body)}
    return {"response_model": answer, "responses": responses | (also or {}), "openapi_extra": extra, **kwargs}


def describe_json_body(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Describe a required JSON body with one of the schemas."""
    _BODIES.update(kinds)
    schemas = [{"$ref": _COMPONENT.format(model=kind.__name__)} for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def add_protobuf(content: dict[str, Any]) -> dict[str, Any]:
    """Add protobuf to the content types of a body or response."""
    binary = {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}}
    return {**content, "content": content["content"] | binary}


def install(app: FastAPI, *, needs_keys: bool, open_paths: Collection[str]) -> None:
    """Set the app's OpenAPI description, which is generated on first use.

    Args:
        open_paths: need no key all the same
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            components = description.setdefault("components", {})
            kinds = sorted(_BODIES, key=lambda kind: kind.__name__)
            _, bodies = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_COMPONENT)
            components["schemas"] = bodies.get("$defs", {}) | components.get("schemas", {})
            if needs_keys:
                scheme = {"type": "apiKey", "in": "header", "name": "X-API-Key"}
                components["securitySchemes"] = {"api_key": scheme}
                description["security"] = [{"api_key": []}]
                for path in set(open_paths) & set(description["paths"]):
                    description["paths"][path]["get"]["security"] = []
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi


# ---- bodies of forward and forward_backward, which `wire.training_requests` reads without these


class _Documented(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class TensorData(_Documented):
    data: list[float]
    dtype: str | None = None
    """`int64`, `float32`"""
    shape: list[int] | None = None


class TextChunk(_Documented):
    tokens: list[int]
    type: str = "encoded_text"


class TextInput(_Documented):
    chunks: list[TextChunk]


class TrainingDatum(_Documented):
    model_input: TextInput
    loss_fn_inputs: dict[str, TensorData]


class TrainingInput(_Documented):
    data: list[TrainingDatum] = Field(min_length=1)
    loss_fn: str = Field(json_schema_extra={"enum": list(LOSSES)})
    loss_fn_config: dict[str, float] | None = None


class ForwardBackwardBody(_Documented):
    model_id: Name
    seq_id: Seq
    forward_backward_input: TrainingInput


class ForwardBody(_Documented):
    model_id: Name
    seq_id: Seq
    forward_input: TrainingInput
