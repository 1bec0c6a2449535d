"""Settings to the OpenAI-compatible endpoint over engines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loguru import logger
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.env_vars import endpoint_api_key
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.openai_api.recorder import RequestRecorder
from skyrl_train.inference_engines.openai_api.server import EndpointServer
from skyrl_train.utils.chat_templates import get_custom_chat_template


def endpoint_of(
    cfg: SkyRLConfig,
    client: InferenceEngineInterface,
    tokenizer: PreTrainedTokenizerBase,
    recorder: RequestRecorder | None = None,
) -> EndpointServer:
    """The endpoint that `generator.*` describes, not started yet. Where a request names no sampling keyword, that of
    `generator.sampling_params` holds."""
    generator, sampling = cfg.generator, cfg.generator.sampling_params
    return EndpointServer(
        client,
        tokenizer,
        generator.served_model_name or generator.model_name,
        generator.http_endpoint_host,
        generator.http_endpoint_port,
        api_key=endpoint_api_key(),
        chat_template=get_custom_chat_template(generator.chat_template),
        chat_template_kwargs=generator.chat_template_kwargs,
        request_timeout_seconds=generator.request_timeout_seconds,
        max_requests=generator.http_endpoint_max_requests,
        recorder=recorder,
        sampling_defaults={
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
        },
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
