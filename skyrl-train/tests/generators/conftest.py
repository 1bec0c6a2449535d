"""A tokenizer of one token a character, an engine that says what it is told, an environment that does."""

import asyncio
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config import GeneratorConfig, SamplingParams, SkyRLGymConfig
from skyrl_train.generators.base import (
    BatchMetadata,
    GeneratorInput,
    GeneratorOutput,
    TrainingPhase,
    TrajectoryID,
)
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import (
    Completion,
    GenerationRequest,
    InferenceEngineInterface,
)
from skyrl_train_testing.tiny_models import build_character_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def characters() -> PreTrainedTokenizerFast:
    """Every character is a token; ChatML around the messages."""
    return build_character_tokenizer(CHATML, start="<|im_start|>", end="<|im_end|>")


@pytest.fixture(scope="session")
def qwen(test_data: Path) -> Callable[[str], PreTrainedTokenizerBase]:
    """Qwen's real tokenizer with one of the real chat templates."""

    base = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen2.5")

    def with_template(name: str) -> PreTrainedTokenizerBase:
        tokenizer = copy.copy(base)
        tokenizer.chat_template = (test_data / "tokenizers" / "chat_templates" / f"{name}.jinja").read_text()
        return tokenizer

    return with_template


@dataclass(frozen=True)
class Say:
    """One answer of the scripted engine. It ends with the end-of-sequence token if it stopped of itself."""

    text: str
    stop_reason: str = "stop"
    eos: bool = True
    last_version: int = 7
    """Weight version of the last token."""


class ScriptedEngine(InferenceEngineInterface):
    """Answers request k of a session with entry k of its script; an exception in a script is raised. Token j of an
    answer has log-prob -(j + 1); the version of the weights is 7, that of its last token the script's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, scripts: dict[str, list[Say | Exception]]) -> None:
        self.tokenizer = tokenizer
        self.scripts = {session: iter(script) for session, script in scripts.items()}
        self.requests: list[GenerationRequest] = []
        self.announced_groups: list[Sequence[Sequence[str | int]]] = []
        """Sessions of each batch, as they were announced."""

    @contextmanager
    def announced(self, groups: Sequence[Sequence[str | int]]) -> Iterator[None]:
        self.announced_groups.append(groups)
        yield

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        say = next(self.scripts[str(request.session_id)])
        if isinstance(say, Exception):
            raise say
        ids: Any = self.tokenizer(say.text, add_special_tokens=False)["input_ids"]
        if say.eos and say.stop_reason == "stop":
            ids = [*ids, self.tokenizer.eos_token_id]
        asked = request.sampling_params.get("logprobs") is not None
        return Completion(
            token_ids=ids,
            stop_reason=say.stop_reason,
            weight_versions=[7] * (len(ids) - 1) + [say.last_version] if ids else [],
            log_probs=[-(j + 1.0) for j in range(len(ids))] if asked else None,
            text=say.text,
        )

    async def weight_version(self) -> int:
        return 7

    async def _nothing(self, *_: Any, **__: Any) -> Any: ...

    pause_generation = resume_generation = abort_generation = sleep = wake_up = reset_prefix_cache = teardown = _nothing
    init_weight_update_communicator = update_named_weights = finish_weight_update = load_lora = unload_lora = _nothing
    describe = check_health = _nothing


class ScriptedEnv(BaseTextEnv):
    """`extras["steps"]` has for each step: reward, says (an observation; None ends the episode), action."""

    closed: list[str] = []  # noqa: RUF012 the test reads which environments were closed

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.extras = extras or {}
        self.max_turns = self.extras["max_turns"]
        self.misbehave("make")

    def misbehave(self, method: str) -> None:
        if method in self.extras.get("sleeps", {}):
            time.sleep(self.extras["sleeps"][method])
        if method in self.extras.get("raises", {}):
            raise self.extras["raises"][method]

    def init(self, prompt):
        self.misbehave("init")
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.misbehave("step")
        step = self.extras["steps"][self.turns]
        self.turns += 1
        self.extras["seen"] = action  # a shared dict would leak to the other samples
        says = step.get("says")
        return BaseTextEnvStepOutput(
            observations=[] if says is None else [{"role": "user", "content": says}],
            reward=step.get("reward", 0.0),
            done=says is None,
            metadata={},
            postprocessed_action=step.get("action"),
        )

    def get_metrics(self) -> dict[str, Any]:
        self.misbehave("get_metrics")
        return self.extras.get("metrics", {"turns": self.turns})

    def close(self) -> None:
        ScriptedEnv.closed.append(str(self.extras.get("name")))
        self.misbehave("close")


class AsyncEnv(ScriptedEnv):
    """The same with coroutines, on the event loop."""

    async def init(self, prompt):
        await asyncio.sleep(0)
        return super().init(prompt)

    async def step(self, action: str):
        await asyncio.sleep(self.extras.get("sleeps", {}).get("astep", 0))
        return super().step(action)


@pytest.fixture
def environments():
    """Registers `scripted` and `scripted_async`; gives the class, whose `closed` lists the names of those closed."""
    skyrl_gym.register(id="scripted", entry_point=ScriptedEnv)
    skyrl_gym.register(id="scripted_async", entry_point=AsyncEnv)
    ScriptedEnv.closed = []
    yield ScriptedEnv
    skyrl_gym.deregister("scripted")
    skyrl_gym.deregister("scripted_async")


@dataclass
class Played:
    """Result of a game."""

    output: GeneratorOutput
    engine: ScriptedEngine
    generator: SkyRLGymGenerator


@dataclass
class Game:
    """Answers and environments of a batch, and the settings they are played with."""

    tokenizer: PreTrainedTokenizerBase
    answers: list[list[Say | Exception]]
    extras: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    gym: dict[str, Any] = field(default_factory=dict)
    env_class: str = "scripted"
    prompt: str = "Q"
    generator_class: type[SkyRLGymGenerator] = SkyRLGymGenerator
    phase: TrainingPhase = "train"

    async def play(self) -> Played:
        settings: dict[str, Any] = {"max_turns": 5, "max_input_length": 10_000, "seed": 1, **self.settings}
        sampling = SamplingParams(**{"max_generate_length": 100, **self.sampling})
        config = GeneratorConfig(sampling_params=sampling, eval_sampling_params=sampling, **settings)
        engine = ScriptedEngine(self.tokenizer, {f"{i}_0": script for i, script in enumerate(self.answers)})
        generator = self.generator_class(config, SkyRLGymConfig(**self.gym), engine, self.tokenizer, "scripted")
        batch = GeneratorInput(
            prompts=[[{"role": "user", "content": self.prompt}] for _ in self.answers],
            env_classes=[self.env_class] * len(self.answers),
            env_extras=self.extras,
            trajectory_ids=[TrajectoryID(str(i), 0) for i in range(len(self.answers))],
            batch_metadata=BatchMetadata(global_step=None, training_phase=self.phase),
        )
        return Played(await generator.generate(batch, disable_tqdm=True), engine, generator)


@pytest.fixture
def game(environments) -> type[Game]:
    return Game


@pytest.fixture
def say() -> type[Say]:
    return Say


@pytest.fixture
def scripted_engine() -> type[ScriptedEngine]:
    return ScriptedEngine
