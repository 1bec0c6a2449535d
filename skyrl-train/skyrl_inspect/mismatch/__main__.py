"""`python -m skyrl_train.entrypoints.main_mismatch key=value …`: measure the gap of log-probs between engines and
trainer.

Every installed (or named, or remote) engine generates responses in every number format under every sampling setting,
each in a separate process, one after the other; the trainer's model then scores the same tokens. Prints tables and
recommended changes, and writes them as JSON.

    python -m skyrl_train.entrypoints.main_mismatch trainer.policy.model.path=MODEL
    … trainer.bf16=false mismatch.engines=[native,vllm] mismatch.dtypes=[float32] mismatch.max_mean_difference=1e-4
    … generator.run_engines_locally=false 'generator.remote_inference_engine_urls=[127.0.0.1:8001]'

It reads the settings of a training run (`trainer.policy`, `trainer.bf16`, `trainer.flash_attn`, `generator.*`,
`data.train_data`), so that the command line of a run fits, and these:
"""

import copy
import inspect
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import hydra
from loguru import logger
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from skyrl_gym.chat.template import ChatTemplate
from skyrl_gym.waits import end_run
from skyrl_inspect.mismatch.answers import SAMPLINGS, EngineAnswers, Questions, Sampling
from skyrl_inspect.mismatch.cells import EngineName
from skyrl_inspect.mismatch.page import format_markdown, to_plain
from skyrl_inspect.mismatch.process import MakeEngine, run_in_process
from skyrl_inspect.mismatch.report import Report, make_report
from skyrl_train.config import SkyRLConfig, config_dir, register_config_store
from skyrl_train.config.base import BaseConfig
from skyrl_train.config.config import DataConfig, get_config_as_dict
from skyrl_train.config.document import read_field_meanings
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.config.typed import Choices, describe_expectation, make_reference
from skyrl_train.config.validation import validate_generator_cfg
from skyrl_train.dataset.dataset import PromptDataset
from skyrl_train.entrypoints.engines import build_engine_factory, build_remote_engine
from skyrl_train.entrypoints.model_files import load_tokenizer, model_config
from skyrl_train.errors import ConfigError, SkyRLError, WorkerError
from skyrl_train.generators.sampling import get_sampling_params
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.types import ConversationType
from skyrl_train.utils.chat_templates import get_configured_chat_template
from skyrl_train.utils.explanations import start_recording_waits
from skyrl_train.utils.io import expand_path, write_atomically
from skyrl_train.utils.process_log import configure_logging
from skyrl_train.utils.run_folder import RunFolder

Backend = Annotated[str, Choices(EngineRegistry.list_registrations)]
Dtype = Literal["float32", "bfloat16", "float16"]

_SEQUENCES_AT_A_TIME = 64

OWN_SAMPLING = "generator.sampling_params"
"""The name of the sampling setting that training would use."""

_BUILT_IN_PROMPTS = (
    "What is 17 + 25?",
    "Write a short story about a fox and a river.",
    "List three prime numbers between 10 and 30, and explain why each one is prime.",
    "Translate into French: the weather is nice today.",
    "def fibonacci(n):",
    "Once upon a time",
    "Solve for x: 3x - 7 = 20. Show every step.",
    "Name the planets of the solar system, from the sun outward.",
)


@dataclass(kw_only=True)
class MismatchConfig(BaseConfig):
    """Settings of the measurement."""

    engines: list[Backend] | None = None
    """Engines to start. null: those that are installed."""

    dtypes: list[Dtype] = field(default_factory=lambda: ["float32", "bfloat16", "float16"])
    """Number formats of the engines. Formats that an engine does not support are listed as not measured. (A server
    keeps its own.)"""

    attention: list[str] = field(default_factory=lambda: ["default"])
    """Attention implementations, by the names that `attention_backend` of vllm or sglang accepts. `default`: the
    engine's own choice, the only one for native. (The trainer's is set by trainer.flash_attn and
    trainer.use_sample_packing.)"""

    samplings: list[str] = field(default_factory=lambda: [OWN_SAMPLING, *SAMPLINGS])
    """Sampling settings to measure, by their names in the table of the report."""

    num_prompts: int = 16
    """Number of prompts, taken from `data.train_data`, or built-in ones and random tokens."""

    max_tokens: int = 64
    """Maximum number of tokens of a response."""

    num_worst_tokens: int = 5
    """Number of tokens with the largest difference to show for each engine."""

    max_mean_difference: float | None = None
    """Largest accepted mean difference [nats]: the command ends with exit code 1 above it, or if nothing could be
    measured. null: no limit."""

    output: str = make_reference("${trainer.run_dir}/mismatch.json")
    """Path of the report in JSON."""


@dataclass(kw_only=True)
class MismatchRunConfig(SkyRLConfig):
    """Settings of a training run and of the measurement."""

    data: DataConfig = field(default_factory=lambda: DataConfig(train_data=[], val_data=[]))
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)


register_config_store(MismatchRunConfig, "mismatch_base_config")


def validate_settings(cfg: DictConfig | MismatchRunConfig) -> MismatchRunConfig:
    """Typed settings.

    Raises:
        ConfigError: one is unknown, or cannot be.
    """
    typed = validate_generator_cfg(MismatchRunConfig.from_dict(get_config_as_dict(cfg)))
    assert isinstance(typed, MismatchRunConfig)
    if typed.trainer.placement.launcher == "inline":
        raise ConfigError(
            "trainer.placement.launcher=inline cannot be used with main_mismatch, which runs each engine in a "
            "separate process, so that all memory is free for the next one; remove it"
        )
    settings = typed.mismatch
    for name in ("num_prompts", "max_tokens"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"mismatch.{name} must be at least 1; got {getattr(settings, name)}")
    for name in ("dtypes", "attention", "samplings"):
        if not getattr(settings, name):
            raise ConfigError(f"mismatch.{name} is empty; set at least one value")
    unknown = [name for name in settings.samplings if name not in (OWN_SAMPLING, *SAMPLINGS)]
    if unknown:
        raise ConfigError(
            f"mismatch.samplings has {unknown[0]!r}; valid values: {', '.join([OWN_SAMPLING, *SAMPLINGS])}. For other "
            "values set generator.sampling_params"
        )
    missing = [name for name in settings.engines or () if not EngineRegistry.get_requirements(name).is_installed]
    if missing and typed.generator.run_engines_locally:
        raise ConfigError(f"mismatch.engines has {missing[0]}, which is not installed; see INSTALL.md")
    return typed


def measure(cfg: MismatchRunConfig) -> tuple[Report, PreTrainedTokenizerBase]:
    """Start one engine after the other, and compare."""
    tokenizer = load_tokenizer(cfg.trainer.policy.model.path)
    samplings = list_samplings(cfg)
    questions = Questions(
        prompts=load_prompts(cfg, tokenizer),
        samplings=samplings,
        max_tokens=cfg.mismatch.max_tokens,
        seed=cfg.generator.seed,
        timeout_seconds=cfg.generator.request_timeout_seconds,
    )
    generator = cfg.generator
    deadline = generator.engine_start_timeout_seconds + len(samplings) * generator.request_timeout_seconds
    logs = RunFolder(cfg.trainer.run_dir).logs_folder
    said: list[tuple[EngineName, EngineAnswers]] = []
    failed: list[tuple[str, str]] = []
    for name, make_engine in build_engines(cfg, questions):
        logger.info(f"asking {name}")
        log_path = logs / f"mismatch_{str(name).replace(' ', '_').replace('/', '_')}.log"
        try:
            answers = run_in_process(make_engine, questions, log_path, deadline)
        except WorkerError as error:
            logger.warning(f"{name} was not measured: {error}")
            failed.append((str(name), str(error)))
            continue
        said.append((replace(name, backend=answers.info.backend, dtype=answers.info.dtype or name.dtype), answers))
    logger.info("scoring with the trainer's model")
    return make_report(cfg, said, samplings, failed), tokenizer


def list_samplings(cfg: MismatchRunConfig) -> list[Sampling]:
    """Return the requested sampling settings; duplicates of the training setting are omitted."""
    own = get_sampling_params(cfg.generator.sampling_params)
    lengths = ("max_tokens", "logprobs", "stop", "min_tokens", "seed")
    known = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    params = {name: value for name, value in own.items() if name not in lengths and known.get(name) != value}
    found: list[Sampling] = []
    for name in cfg.mismatch.samplings:
        sampling = Sampling(OWN_SAMPLING, params) if name == OWN_SAMPLING else SAMPLINGS[name]
        if all(sampling.params != other.params for other in found):
            found.append(sampling)
    return found


def load_prompts(cfg: MismatchRunConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return prompts of the training data, or the built-in ones; random tokens where there are too few."""
    count = cfg.mismatch.num_prompts
    longest = cfg.trainer.max_prompt_length
    chat_template = get_configured_chat_template(tokenizer, cfg.generator)
    if cfg.data.train_data:
        data = PromptDataset(
            cfg.data.train_data, tokenizer, longest, chat_template=chat_template, cache_dir=cfg.data.cache_dir
        )
        messages = [data[index][0] for index in range(min(count, len(data)))]
    else:
        messages = [[{"role": "user", "content": text}] for text in _BUILT_IN_PROMPTS[:count]]
    prompts = [_encode_prompts(chat_template, conversation)[-longest:] for conversation in messages]
    context = getattr(_get_text_config(cfg), "max_position_embeddings", None) or longest + cfg.mismatch.max_tokens
    room = context - cfg.mismatch.max_tokens
    if room < 1:
        raise ConfigError(
            f"mismatch.max_tokens={cfg.mismatch.max_tokens} leaves no room for a prompt in the model's context of "
            f"{context} tokens"
        )
    prompts = [prompt for prompt in (prompt[-room:] for prompt in prompts) if prompt]
    draw = random.Random(cfg.generator.seed)
    words = min(len(tokenizer), _get_text_config(cfg).vocab_size)
    while len(prompts) < count:
        prompts.append([draw.randrange(words) for _ in range(draw.randint(1, min(32, room)))])
    return prompts


def build_engines(cfg: MismatchRunConfig, questions: Questions) -> Iterator[tuple[EngineName, MakeEngine]]:
    """Return the engines to measure, each with its builder."""
    generator = cfg.generator
    if not generator.run_engines_locally:
        for url in generator.remote_inference_engine_urls:
            yield EngineName(backend="server", dtype=None, url=url), partial(_make_remote_engine, cfg, url)
        return
    device = cfg.trainer.placement.resolve_device()
    for backend in cfg.mismatch.engines or _list_installed_engines():
        for dtype in cfg.mismatch.dtypes:
            has_choice = EngineRegistry.get_requirements(backend).attention_choice
            for attention in cfg.mismatch.attention if has_choice else ["default"]:
                name = EngineName(backend=backend, dtype=dtype, attention=attention)
                yield name, build_engine_factory(_make_settings(cfg, name, questions), device)


def _make_settings(cfg: MismatchRunConfig, name: EngineName, questions: Questions) -> SkyRLConfig:
    """The settings of a run with this engine, sized for the questions."""
    own = copy.deepcopy(cfg)
    own.trainer.placement.colocate_all = False
    generator = own.generator
    kwargs = generator.engine_init_kwargs if name.backend == generator.backend else {}
    if name.attention != "default":
        kwargs = kwargs | {"attention_backend": name.attention}
    longest = max(max(map(len, questions.prompts)) + questions.max_tokens, 32)  # fixed tokens have fewer
    context = getattr(_get_text_config(cfg), "max_position_embeddings", None) or longest
    generator.engine_init_kwargs = {"max_model_len": min(longest, context)} | kwargs
    generator.backend = name.backend
    generator.model_dtype = cast(Dtype, name.dtype)
    generator.max_num_seqs = min(generator.max_num_seqs, _SEQUENCES_AT_A_TIME)
    return own


def _list_installed_engines() -> list[str]:
    return [name for name, entry in EngineRegistry.list_registrations().items() if entry.requires.is_installed]


def _make_remote_engine(cfg: MismatchRunConfig, url: str) -> InferenceEngineInterface:
    generator = cfg.generator
    return build_remote_engine(generator, url, load_tokenizer(cfg.trainer.policy.model.path), generator.backend)


def _encode_prompts(chat: ChatTemplate, messages: ConversationType) -> list[int]:
    if not (chat.chat_template or chat.tokenizer.chat_template):  # a base model: plain text, special tokens around it
        text = "\n".join(str(message["content"]) for message in messages)
        return list(chat.tokenizer(text, add_special_tokens=True)["input_ids"])
    return chat.encode(chat.text(messages, add_generation_prompt=True))


def _get_text_config(cfg: MismatchRunConfig) -> Any:
    return model_config(cfg.trainer.policy.model.path, "trainer.policy.model.path").get_text_config()


def publish(report: Report, cfg: MismatchRunConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Print the report and write it. Returns: the exit code."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    settings = cfg.mismatch
    print(format_markdown(report, decode, settings.num_worst_tokens))
    plain = to_plain(report, decode, settings.num_worst_tokens)
    path = expand_path(settings.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    limit = settings.max_mean_difference
    above = [] if limit is None else [f"{cell.engine}, {cell.sampling.name}" for cell in report.above(limit)]
    plain["limit"] = {"max_mean_difference": limit, "above": above}
    write_atomically(path, json.dumps(plain, indent=1, allow_nan=False) + "\n")
    print(f"written to {path}")
    if limit is None:
        return 0
    if not report.cells:
        print("no engine was measured")
        return 1
    if above:
        print(f"above mismatch.max_mean_difference={limit:g}: {'; '.join(above)}")
    return 1 if above else 0


def format_help() -> str:
    """Return the help of this command and its own settings."""
    hints = get_type_hints(MismatchConfig, include_extras=True)
    meanings, defaults = read_field_meanings(MismatchConfig), asdict(MismatchConfig())
    lines = [
        f"  mismatch.{setting.name}={json.dumps(defaults[setting.name])}  "
        f"({describe_expectation(hints[setting.name])})\n      {meanings[setting.name]}"
        for setting in fields(MismatchConfig)
    ]
    return "\n".join([inspect.cleandoc(__doc__ or ""), "", *lines, "", "All others: docs/configuration.md"])


@hydra.main(config_path=config_dir, config_name="mismatch_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    try:
        typed = validate_settings(cfg)
        configure_logging(RunFolder(typed.trainer.run_dir).log_path("mismatch"))
        start_recording_waits(Path(typed.trainer.run_dir))
        report, tokenizer = measure(typed)
    except SkyRLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        end_run()
    sys.exit(publish(report, typed, tokenizer))


if __name__ == "__main__":
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(format_help())
    else:
        main()
