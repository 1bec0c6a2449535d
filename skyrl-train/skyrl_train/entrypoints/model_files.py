"""Checks of models in `*.model.path` before the start: configs and tokenizers, from folders or the hub."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from loguru import logger
from transformers import AutoConfig, PreTrainedTokenizerBase

from skyrl_gym.chat.tokenizer_check import find_tokenizer_fault
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.training_backends import TrainingBackendRegistry
from skyrl_train.errors import ConfigError
from skyrl_train.utils.lean_imports import hide_unused_packages

_TOKENIZER_FILES = ("tokenizer", "tokenization", "vocab", "spiece", "sentencepiece", "tekken", "merges", "encoder")
"""Prefixes of tokenizer file names. Without any, transformers creates an empty tokenizer for some models."""

_NUM_PROBES = 50
"""Approximate number of vocabulary words that `load_tokenizer` checks."""

_HUB_HINT = "check the spelling, the network, HF_TOKEN (for gated models) and HF_HUB_OFFLINE, or use a local folder"


SAMPLING = ("sampling_params", "eval_sampling_params")
"""Sections of `generator` with the sampling parameters of a training run."""


def check_models(cfg: SkyRLConfig, sampling: Sequence[str] = SAMPLING) -> None:
    """Check that the config of every model of the run can be read, and that responses fit the policy's context.

    Args:
        sampling: the sections of `generator` with the run's sampling parameters.

    Raises:
        ConfigError: a path without a model, or responses longer than the context.
    """
    trainer = cfg.trainer
    policy = model_config(trainer.policy.model.path, "trainer.policy.model.path")
    check = TrainingBackendRegistry.get_requirements(trainer.strategy).check_model_config
    check(policy, trainer.policy, "trainer.policy")
    if trainer.critic.model.path is not None:
        model_config(trainer.critic.model.path, "trainer.critic.model.path")
    if trainer.algorithm.uses_reference_model and trainer.ref.model.path is not None:
        check(model_config(trainer.ref.model.path, "trainer.ref.model.path"), trainer.ref, "trainer.ref")
    _check_lengths(cfg, policy, sampling)


def model_config(path: str, setting: str) -> Any:
    """Return the transformers config of the model at `path`, the value of `setting`.

    Raises:
        ConfigError: it is missing or invalid.
    """
    _check_folder(path, setting)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=True)
    except Exception as error:  # a model may include custom code
        raise ConfigError(_build_loading_error(path, setting, "config", error)) from error


def load_tokenizer(
    path: str, setting: str = "trainer.policy.model.path", *, use_fast: bool = True, **options: object
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model at `path`, with a padding token.

    Raises:
        ConfigError: it is missing, loses text, or has ids without an embedding in the model; or without `use_fast`, it
            has no Python implementation (transformers then silently loads the fast one).
    """
    hide_unused_packages()
    from transformers import AutoTokenizer, GenerationConfig  # import half of the dependencies of models

    _check_folder(path, setting)
    folder = Path(path)
    if folder.is_dir() and not any(file.name.startswith(_TOKENIZER_FILES) for file in folder.iterdir()):
        raise ConfigError(
            f"{setting}={path}: the folder has no tokenizer (tokenizer.json, or files of an older format)"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=True, use_fast=use_fast, **options
        )
    except Exception as error:  # a model may include custom code
        raise ConfigError(_build_loading_error(path, setting, "tokenizer", error)) from error
    if tokenizer.is_fast and not use_fast:
        raise ConfigError(
            f"trainer.disable_fast_tokenizer=true: transformers {transformers.__version__} has no slow (Python) "
            f"version of {type(tokenizer).__name__}, the tokenizer of {path}; set it to false"
        )
    _check_kind(tokenizer, folder, setting)
    if fault := find_tokenizer_fault(tokenizer, _get_vocab_size(path, setting)):
        raise ConfigError(f"{setting}={path}: {fault}")
    if not folder.is_dir():
        with contextlib.suppress(OSError):  # `skyrl_gym.chat.turn_ends` reads it from the cache
            GenerationConfig.from_pretrained(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _get_vocab_size(path: str, setting: str) -> int | None:
    """Return the number of embeddings of the model at `path`; None if its config names none or cannot be read, which
    `model_config` reports where the model is used."""
    with contextlib.suppress(ConfigError):
        return getattr(model_config(path, setting).get_text_config(), "vocab_size", None)
    return None


def _check_kind(tokenizer: PreTrainedTokenizerBase, folder: Path, setting: str) -> None:
    """Check that transformers did not replace the rules of `tokenizer.json`: for some kinds of models it always loads
    its own class, and so do engines.

    Raises:
        ConfigError: text of vocabulary words round-trips through the file's tokenizer, but not through this one.
    """
    if not tokenizer.is_fast or not (folder / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer

    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = file.get_vocab_size()
    pieces = (file.decode([id], skip_special_tokens=True).strip() for id in range(0, size, max(1, size // _NUM_PROBES)))
    text = " ".join(piece for piece in pieces if piece.isprintable() and piece)
    ids = file.encode(text, add_special_tokens=False).ids
    given: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    if given != ids and file.decode(ids) == text and file.decode(given) != text:
        raise ConfigError(
            f"{setting}={folder}: transformers {transformers.__version__} loads this folder's tokenizer as "
            f"{type(tokenizer).__name__}because of model_type in config.json, and loses text: {text[:40]!r} becomes "
            f"{file.decode(given)[:40]!r}, though tokenizer.json keeps it. Save a tokenizer of that class, or choose "
            "a model_type that has no tokenizer class of its own (such as qwen3)"
        )


def _check_folder(path: str, setting: str) -> None:
    folder = Path(path)
    if folder.is_file():
        raise ConfigError(f"{setting}={path} is a file; use the model's folder (with config.json) or a hub name")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            content = ", ".join(sorted(child.name for child in folder.iterdir())[:8]) or "nothing"
            raise ConfigError(f"{setting}={path} is not a model: the folder has no config.json; it contains {content}")
        return
    if path.startswith(("/", ".", "~")) or (path.count("/") != 1 and "/" in path):
        hint = "; ~ is not expanded here" if path.startswith("~") else ""
        raise ConfigError(f"{setting}={path}: no such folder (looked for {folder.absolute()}{hint})")


def _build_loading_error(path: str, setting: str, what: str, error: Exception) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if Path(path).is_dir():
        return f"{setting}={path}: the {what} in this folder cannot be loaded: {reason}"
    return (
        f"{setting}={path} is not a local folder, and cannot be loaded from the Hugging Face hub: {reason} {_HUB_HINT}"
    )


def _check_lengths(cfg: SkyRLConfig, policy: object, sections: Sequence[str]) -> None:
    """Check that the engine's context fits a prompt and a response of `max_generate_length`."""
    generator, overrides = cfg.generator, cfg.trainer.policy.model_config_kwargs
    limit, source = _get_context(generator.engine_init_kwargs, overrides, policy)
    if limit is None or not generator.uses_environments:
        return
    for name in sections:
        length = getattr(generator, name).max_generate_length
        if length >= limit:
            raise ConfigError(
                f"generator.{name}.max_generate_length={length} must be below the model's context of {limit} tokens "
                f"({source}), which includes the prompt; with "
                f"trainer.max_prompt_length={cfg.trainer.max_prompt_length}, at most "
                f"{max(1, limit - cfg.trainer.max_prompt_length)} always fit"
            )
        if generator.max_input_length + length > limit:
            logger.warning(
                f"generator.max_input_length={generator.max_input_length} and "
                f"generator.{name}.max_generate_length={length} add up to more than the model's context of {limit} "
                f"tokens ({source}): responses to long prompts will be truncated"
            )


def _get_context(engine: dict[str, Any], overrides: dict[str, Any], policy: Any) -> tuple[int | None, str]:
    """Return the maximum number of tokens of prompt and response, or None if unknown, and the source of the number."""
    limit = engine.get("max_model_len")
    if isinstance(limit, int) and limit > 0:  # else the engine reports it
        return limit, "generator.engine_init_kwargs.max_model_len"
    text = policy.get_text_config()
    limit = overrides.get("max_position_embeddings", getattr(text, "max_position_embeddings", None))
    scaling = overrides.get("rope_scaling") or getattr(text, "rope_scaling", None) or {}
    if limit is None or scaling.get("factor", 1) > 1:  # engines treat a stretched context differently
        return None, ""
    return int(limit), "max_position_embeddings of its config"
