"""Rollout engines with an OpenAI-compatible endpoint, without training: `python -m skyrl_train.entrypoints.serve
key=value …`. Settings are `generator.*`, `trainer.policy.model.path`, `trainer.placement.device`; it needs no data.
SIGINT and SIGTERM shut it down in order.

`SKYRL_ENDPOINT_API_KEY`, if set, is the key that clients must send.
"""

import asyncio
import contextlib
import signal
import sys

import hydra
from loguru import logger
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig, config_dir, register_config_store
from skyrl_train.config.validation import validate_generator_cfg
from skyrl_train.endpoint.server import check_address
from skyrl_train.entrypoints.endpoint import build_endpoint, listening
from skyrl_train.entrypoints.engines import check_engines, start_engines
from skyrl_train.entrypoints.model_files import load_tokenizer
from skyrl_train.errors import SkyRLError
from skyrl_train.utils import initialize_ray, shutdown_ray
from skyrl_train.utils.process_log import configure_logging
from skyrl_train.utils.run_folder import RunFolder

register_config_store()


async def serve(cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Start the engines and the endpoint, and serve until cancelled."""
    client = start_engines(cfg, tokenizer)
    try:
        info = await client.describe()  # waits until the engines are ready
        async with listening(build_endpoint(cfg, client, tokenizer)) as server:
            names = ", ".join(server.frontend.model_names)
            print(f"serving {names} at {server.url}", flush=True)
            logger.info(f"{info.backend} {info.release}, up to {info.max_model_len} tokens, {server.url}")
            await asyncio.Event().wait()
    finally:
        await client.teardown()


async def _run_until_signal(cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Run `serve` until SIGINT or SIGTERM."""
    serving = asyncio.create_task(serve(cfg, tokenizer))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    logger.info("stop requested; the engines are closed")


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    cfg.trainer.logger = "console"  # nothing is tracked, so no tracker's key is required
    try:
        typed: SkyRLConfig = validate_generator_cfg(cfg)
        configure_logging(RunFolder(typed.trainer.run_dir).log_path("serve"))
        check_engines(typed)
        check_address(typed.generator.http_endpoint_host, typed.generator.http_endpoint_port)
        tokenizer = load_tokenizer(
            typed.generator.model_name, "generator.model_name", use_fast=not typed.trainer.disable_fast_tokenizer
        )
        if typed.generator.run_engines_locally:
            initialize_ray(typed)
        asyncio.run(_run_until_signal(typed, tokenizer))
    except SkyRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        shutdown_ray()


if __name__ == "__main__":
    main()
