"""Web application: middlewares, endpoints, description. The caller starts and stops the service."""

from fastapi import FastAPI

from tx import __version__
from tx.tinker.base_model import BaseModelFacts
from tx.tinker.config import EngineConfig
from tx.tinker.http import openapi, problems
from tx.tinker.http.api_keys import ApiKeys, read_api_keys
from tx.tinker.http.auth import OPEN_PATHS, Authenticator
from tx.tinker.http.bodies import Counted, Intake
from tx.tinker.http.connections import Connections
from tx.tinker.http.downloads import Downloads
from tx.tinker.http.metrics import Measured, Metrics
from tx.tinker.http.polls import OpenPolls
from tx.tinker.http.routes import (
    downloads,
    futures,
    models,
    not_here,
    openai,
    runs,
    sampling,
    server,
    sessions,
    training,
    weights,
)
from tx.tinker.service.service import TinkerService
from tx.tinker.storage.folders import Folders
from tx.tinker.texts import Texts

API = "/api/v1"
MANY_CONNECTIONS = 10_000


def create_app(
    service: TinkerService,
    config: EngineConfig,
    facts: BaseModelFacts,
    folders: Folders,
    keys: ApiKeys | None = None,
    connections: Connections | None = None,
) -> FastAPI:
    """
    Args:
        service: started by the caller before the first request, and closed after the last
        facts: of the base model, with its tokenizer for text requests
        folders: of the checkpoints, for downloads
        keys: read from the settings if omitted
        connections: of the web server; if omitted (in tests), the limit is large

    Raises:
        ConfigError: API keys cannot be read, or are missing and required for the host.
    """
    keys = read_api_keys(config) if keys is None else keys
    app = FastAPI(
        title="tx",
        version=__version__,
        summary="A training service with the API of the tinker SDK",
        redirect_slashes=False,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    state = app.state
    state.service, state.config, state.folders = service, config, folders
    if connections is None:
        connections = Connections(MANY_CONNECTIONS)
    intake = Intake(config.max_bodies_mb * 2**20, connections.limit)
    state.polls = OpenPolls()
    state.connections, state.metrics = connections, Metrics(service, connections, intake)
    state.texts = Texts(facts.folder)
    state.downloads = Downloads.load_or_create(config.state_folder)

    # Asked for most often first: routes are tried in order.
    for family in (futures, sampling, sessions, training, models, weights, runs, downloads, server, not_here):
        app.include_router(family.router, prefix=API)
    app.include_router(openai.router)
    app.include_router(downloads.downloads)
    app.include_router(server.pages)

    # The last one added is the outermost.
    app.add_middleware(Counted, intake=intake)
    app.add_middleware(Authenticator, keys=keys)
    app.add_middleware(problems.Unforeseen)
    app.add_middleware(Measured, metrics=state.metrics)
    problems.install(app)
    openapi.install(app, needs_keys=bool(keys), open_paths=OPEN_PATHS)
    return app
