"""The retrieval server's two addresses, `POST /retrieve` and `GET /health`."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_gym.tools.retrieval.batching import Batcher, Overloaded
from skyrl_gym.tools.retrieval.corpus import Document
from skyrl_gym.tools.retrieval.settings import RetrievalSettings
from skyrl_gym.tools.retrieval.store import Retriever


class RetrieveRequest(BaseModel):
    """One query, or several."""

    model_config = ConfigDict(extra="forbid")

    query: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)] | None = None
    queries: list[Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]] | None = None
    topk: int | None = Field(default=None, ge=1)
    """Documents for each query. None: as many as the server was started with."""
    return_scores: bool = False
    """Return each document with its score: `{"document": ..., "score": ...}`."""


def create_app(retriever: Retriever, settings: RetrievalSettings | None = None) -> FastAPI:
    """Return an application that answers from a retriever. `settings` hold its limits."""
    settings = settings or RetrievalSettings()
    batcher = Batcher(retriever.search, retriever.index.batch_size)

    @contextlib.asynccontextmanager
    async def searching(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = FastAPI(title="Retrieval", lifespan=searching)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_exception_handler(RequestValidationError, _explain)

    @app.get("/health")
    async def health() -> dict[str, object]:
        """Describe the index that is served. Requests are answered only once it is loaded."""
        return {"ready": True, "index": retriever.kind, "documents": len(retriever.documents)}

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> Response:
        """Return `{"result": [[document, ...], ...]}`: the documents of each query, best first."""
        queries, topk = _check_request(request, settings)
        try:
            groups = await batcher.search(queries, topk)
        except Overloaded as failure:
            raise HTTPException(503, f"{failure}; try again", headers={"Retry-After": "1"}) from failure

        def to_hit(document: Document, score: float) -> Document:
            return {"document": document, "score": score} if request.return_scores else document

        result = [[to_hit(*found) for found in group] for group in groups]
        # ASCII, because a document may hold what UTF-8 cannot express.
        return Response(json.dumps({"result": result}), media_type="application/json")

    return app


class BodyLimit:
    """Middleware that rejects a request with a too long body before reading all of it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = dict(scope.get("headers", [])).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.max_bytes:
            await JSONResponse({"detail": self._rule}, status_code=413)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:  # it came in chunks, without a declared length
                raise HTTPException(413, self._rule)
            return message

        await self.app(scope, counted, send)

    @property
    def _rule(self) -> str:
        return f"Content Too Large: a request may have at most {self.max_bytes} bytes"


def _check_request(request: RetrieveRequest, settings: RetrievalSettings) -> tuple[list[str], int]:
    """Check the limits. Returns queries and number of documents. Raises HTTPException, with a text for the model."""
    if (request.query is None) == (request.queries is None):
        raise HTTPException(422, "pass either query, a string, or queries, a list of strings")
    queries = [request.query] if request.query is not None else request.queries or []
    if not 1 <= len(queries) <= settings.max_queries:
        raise HTTPException(
            422, f"queries must contain 1 to {settings.max_queries} strings; it contains {len(queries)}"
        )
    longest = max(map(len, queries))
    if longest > settings.max_query_characters:
        raise HTTPException(422, f"a query has {longest} characters; {settings.max_query_characters} are allowed")
    topk = settings.topk if request.topk is None else request.topk
    if topk > settings.max_topk:
        raise HTTPException(422, f"topk must be 1 to {settings.max_topk}; got {topk}")
    return queries, topk


async def _explain(_: Request, failure: Exception) -> JSONResponse:
    """Return a wrong request in one line: which field, and which rule."""
    assert isinstance(failure, RequestValidationError)
    faults = (f"{'.'.join(map(str, error['loc'][1:])) or 'body'}: {error['msg']}" for error in failure.errors())
    return JSONResponse({"detail": "; ".join(faults)}, status_code=422)
