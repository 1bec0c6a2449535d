"""Construction of the OpenAI-compatible endpoint from settings."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loguru import logger
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.endpoint.recorder import RequestRecorder
from skyrl_train.endpoint.server import EndpointServer
from skyrl_train.endpoint.session_endpoint import build_endpoint_settings
from skyrl_train.env_vars import endpoint_api_key
from skyrl_train.inference_engines.base import InferenceEngineInterface


def build_endpoint(
    cfg: SkyRLConfig,
    client: InferenceEngineInterface,
    tokenizer: PreTrainedTokenizerBase,
    recorder: RequestRecorder | None = None,
) -> EndpointServer:
    """Build the endpoint configured by `generator.*`, not started yet."""
    return EndpointServer(
        client,
        tokenizer,
        host=cfg.generator.http_endpoint_host,
        port=cfg.generator.http_endpoint_port,
        api_key=endpoint_api_key(),
        recorder=recorder,
        **build_endpoint_settings(cfg.generator),
    )


@asynccontextmanager
async def listening(server: EndpointServer) -> AsyncIterator[EndpointServer]:
    """Run the server during the block, in the current event loop."""
    await server.start()
    logger.info(f"engines are served at {server.url}")
    try:
        yield server
    finally:
        await server.stop()
