"""Startup check of a server: model, vocabulary and context must match the trainer."""

from pathlib import PurePosixPath

from transformers import AutoConfig, PreTrainedTokenizerBase

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.remote.connection import run_to_end
from skyrl_train.inference_engines.remote.server import RemoteInferenceEngine

_SETTING = "generator.remote_inference_engine_urls"
_TEXTS = ("Hello, world!", "def f(x):\n    return 2 * x + 10\n", "naïve café, 東京 42", "  two  spaces\tand a tab")
_MOST_SPECIAL_TOKENS = 64


def check_server(engine: RemoteInferenceEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the server serves the trainer's model, with its vocabulary and tokenizer.

    Raises:
        ConfigError: it does not; names the setting, the URL, both values and the correct start command.
    """
    _check_name(engine)
    run_to_end(_check_contents(engine, tokenizer))


async def _check_contents(engine: RemoteInferenceEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    await _check_vocabulary(engine)
    await _check_tokenizer(engine, tokenizer)
    await engine.disconnect()


def _check_name(engine: RemoteInferenceEngine) -> None:
    ours = _get_last_path_part(engine.model_name)
    if ours not in {_get_last_path_part(name) for name in engine.served_names}:
        raise ConfigError(
            f"{_SETTING}: the server at {engine.url} serves {', '.join(engine.served_names)}; generator.model_name is "
            f"{engine.model_name}. Start it with that model (or set --served-model-name):\n{_suggest_command(engine)}"
        )


async def _check_vocabulary(engine: RemoteInferenceEngine) -> None:
    try:
        config = AutoConfig.from_pretrained(engine.model_name, trust_remote_code=True).get_text_config()
    except (OSError, ValueError):
        return  # the trainer itself reports a missing model
    info = await engine.describe()
    if info.vocab_size != config.vocab_size:
        raise ConfigError(
            f"{_SETTING}: the server at {engine.url} takes token ids below {info.vocab_size}; the vocabulary of "
            f"{engine.model_name} has {config.vocab_size}: it may serve another model under this name. Start it "
            f"with:\n{_suggest_command(engine)}"
        )


async def _check_tokenizer(engine: RemoteInferenceEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    special = [str(token) for token in tokenizer.all_special_tokens[:_MOST_SPECIAL_TOKENS]]
    for text in (*_TEXTS, *special):
        ours = list(tokenizer.encode(text, add_special_tokens=False))
        theirs = await engine.tokenize(text)
        if ours != theirs:
            raise ConfigError(
                f"{_SETTING}: the tokenizer of the server at {engine.url} differs from that of {engine.model_name}: "
                f"{text!r} is {_list_some(theirs)} there and {_list_some(ours)} here. Start it with the trainer's "
                f"model folder, or with {engine.protocol.tokenizer_option} set to its "
                f"tokenizer:\n{_suggest_command(engine)}"
            )


def _get_last_path_part(name: str) -> str:
    """Return the last part of a path or hub name, since a model's folder differs between machines."""
    return PurePosixPath(name.rstrip("/")).name.lower()


def _suggest_command(engine: RemoteInferenceEngine) -> str:
    return engine.protocol.start_command(engine.model_name, engine.url)


def _list_some(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}]"
