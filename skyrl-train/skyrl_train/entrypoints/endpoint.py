"""Settings to the OpenAI-compatible endpoint over engines."""

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


def endpoint_of(
    cfg: SkyRLConfig,
    client: InferenceEngineInterface,
    tokenizer: PreTrainedTokenizerBase,
    recorder: RequestRecorder | None = None,
) -> EndpointServer:
    """The endpoint that `generator.*` describes, not started yet."""
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
    """The server answers inside of the block, in the event loop around it."""
    await server.start()
    logger.info(f"the engines are at {server.url}")
    try:
        yield server
    finally:
        await server.stop()
