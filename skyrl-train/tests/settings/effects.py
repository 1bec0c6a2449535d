"""Effects of settings: a row names a setting, another value for it, and where the difference must be seen."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from recording import Record, recording

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.error import InfraError
from skyrl_train.config import SkyRLConfig, validate_cfg
from skyrl_train.distributed.sharded_tensor import gather_full_tensor
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.entrypoints.main_distill import DistillationExp
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.generators.base import GeneratorInput, GeneratorOutput
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_mixture, build_tiny_qwen3

Settings = Mapping[str, Any]
"""Values by the settings' full names."""


See = Callable[["Bench", Settings], Any]
"""Function that tries settings and returns an observation."""


@dataclass(frozen=True)
class Row:
    """The proof that one setting is not ignored."""

    setting: str
    value: Any
    """One that differs from that of the base."""

    see: See
    """Observation that must change with the setting."""

    given: Settings = field(default_factory=dict)
    """Settings that it needs to matter, in both cases. For the setting itself: the value to start from."""


@dataclass(frozen=True)
class OneChoice:
    """A setting of one choice: another one is refused by name."""

    setting: str
    value: Any


class All:
    """Several things seen, each of which must change."""

    def __init__(self, *parts: Any):
        self.parts = parts


class Toy(BaseTextEnv):
    """Pays for different characters; goes on for up to `max_turns` turns. The prompt's last word is what it adds."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()
        self.turns = 0
        self.max_turns = (extras or {}).get("max_turns", 1)
        self.bonus = (env_config or {}).get("bonus", 0.0)
        self.is_in_event_loop = asyncio._get_running_loop() is not None

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns >= self.max_turns
        reward = len(set(action)) / (1 + len(action)) + action.count("e") + self.bonus
        observations = [] if done else [{"role": "user", "content": "go on"}]
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})

    def get_metrics(self) -> dict[str, Any]:
        return {"in_event_loop": float(self.is_in_event_loop)}


class UnluckyToy(Toy):
    """Needs something that is not there for every other prompt."""

    def init(self, prompt: Any) -> Any:
        if prompt[-1]["content"].count("!") % 2:
            raise InfraError("no server")
        return super().init(prompt)


class SometimesToy(Toy):
    """Pays 1 for whatever is said to every other prompt."""

    def init(self, prompt: Any) -> Any:
        self.is_generous = prompt[-1]["content"].count("!") % 2 == 0
        return super().init(prompt)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        output = super().step(action)
        if self.is_generous:
            output["reward"] = 1.0
        return output


ENVIRONMENTS = {"toy": Toy, "sometimes_toy": SometimesToy, "unlucky_toy": UnluckyToy}


class RecordingGenerator(SkyRLGymGenerator):
    """Generator that records its requests."""

    asked: list[GeneratorInput]

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        self.asked.append(input_batch)
        return await super().generate(input_batch, disable_tqdm)


class Experiment(BasePPOExp):
    """A run that can be looked at."""

    trainer: RayPPOTrainer | None = None
    policy_worker = PolicyWorker

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> RecordingGenerator:
        generator = RecordingGenerator(
            cfg.generator, cfg.environment.skyrl_gym, inference_engine_client, tokenizer, "toy"
        )
        generator.asked = []
        return generator

    def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
        self.trainer = super().get_trainer(*args, **kwargs)
        vars(self.trainer)["build_models"] = partial(self.trainer.build_models, policy_worker=self.policy_worker)
        return self.trainer


class Distillation(Experiment, DistillationExp):
    """The same, with teachers."""


@dataclass
class Run:
    """A run that has ended, one way or the other."""

    folder: Path
    experiment: Experiment | None
    record: Record
    log: list[str]
    error: str

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each step, without times, peaks of memory (which depend on what ran before in this process) and
        prompt tokens that were cached (which depend on the requests that came together)."""
        return [
            {
                name: value
                for name, value in row.items()
                if name not in ("time", "engines/prefix_cache_hit_rate", "engines/prompt_tokens_computed")
                and "seconds" not in name
                and "timing" not in name
                and not name.startswith("memory/")
            }
            for row in RunFolder(self.folder / "run").read_metrics()
        ]

    @property
    def asked(self) -> list[GeneratorInput]:
        """Requests to the generator."""
        assert self.experiment is not None and self.experiment.trainer is not None
        generator = self.experiment.trainer.generator
        assert isinstance(generator, RecordingGenerator)
        return generator.asked

    @cached_property
    def trajectories(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for path in sorted((self.folder / "run" / "trajectories").rglob("*.jsonl"))
            if not path.stem.endswith("_tokens")
            for line in path.read_text().splitlines()
        ]

    @cached_property
    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def worker(self, name: str) -> Any:
        """The policy's, the critic's or the reference's only rank."""
        assert name in self.record.workers, self.error
        return self.record.workers[name]


class Bench:
    """Runs settings, each combination once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._runs: dict[str, Run] = {}
        self._num_runs = 0
        tokenizer = build_character_tokenizer()
        self.models = {}
        for name, scale in (("model", 1.0), ("other_model", 2.0)):
            self.models[name] = str(folder / name)
            tokenizer.save_pretrained(folder / name)
            shape = dict(hidden_size=32, scale=scale, vocab_size=len(tokenizer), max_position_embeddings=512)
            build_tiny_qwen3(**shape).save_pretrained(folder / name)
        self.models["mixture"] = str(folder / "mixture")
        tokenizer.save_pretrained(folder / "mixture")
        shape = dict(scale=3.0, num_experts=8, vocab_size=len(tokenizer), max_position_embeddings=512)
        build_tiny_mixture(**shape).save_pretrained(folder / "mixture")
        for name, mark in (("template", "::"), ("other_template", "=>")):
            (folder / f"{name}.jinja").write_text(
                "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<end>"
                "{% endgeneration %}{% else %}{{ m['content'] }}{{ shout }}{% endif %}{% endfor %}"
                "{% if add_generation_prompt %}" + mark + "{% endif %}"
            )
        for name, words in (("prompts", "write {}"), ("other_prompts", "say {}")):
            rows = [
                {"prompt": [{"role": "user", "content": words.format(i) + "!" * i}], "data_source": "toy"}
                for i in range(8)
            ]
            (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    def forget(self) -> None:
        """The next runs are new ones."""
        self._runs = {}

    def base(self, run_dir: Path) -> dict[str, Any]:
        return {
            "data.train_data": [str(self.folder / "prompts.jsonl")],
            "data.val_data": [],
            "environment.env_class": "toy",
            "trainer.run_dir": str(run_dir),
            "trainer.policy.model.path": self.models["model"],
            "trainer.policy.optimizer_config.lr": 1e-2,
            "trainer.critic.optimizer_config.lr": 1e-2,
            "trainer.placement.device": "cpu",
            "trainer.placement.launcher": "inline",
            "trainer.bf16": False,
            "trainer.gradient_checkpointing": False,
            "trainer.train_batch_size": 2,
            "trainer.policy_mini_batch_size": 2,
            "trainer.critic_mini_batch_size": 2,
            "trainer.micro_train_batch_size_per_gpu": 8,
            "trainer.micro_forward_batch_size_per_gpu": 8,
            "trainer.max_training_steps": 1,
            "trainer.max_prompt_length": 64,
            "trainer.ckpt_interval": -1,
            "trainer.eval_interval": -1,
            "trainer.algorithm.use_kl_loss": False,
            "generator.backend": "native",
            "generator.model_dtype": "float32",
            "generator.n_samples_per_prompt": 3,
            "generator.sampling_params.max_generate_length": 6,
            "generator.eval_sampling_params.max_generate_length": 6,
            "generator.weight_sync_canary_interval": 0,
        }

    def config(self, settings: Settings, run_dir: Path | None = None) -> SkyRLConfig:
        """The base with these settings. "{name}" in a text is a model, or the bench's folder."""
        values = self.base(run_dir or self.folder / "never") | dict(settings)
        nested: dict[str, Any] = {}
        for name, value in values.items():
            name = name.replace("<env_class>", "toy")
            *sections, leaf = name.split(".")
            section = nested
            for part in sections:
                section = section.setdefault(part, {})
            section[leaf] = self._filled(value, run_dir)
        return SkyRLConfig.from_dict(nested)

    def _filled(self, value: Any, run_dir: Path | None) -> Any:
        if isinstance(value, str):
            places = self.models | {"folder": str(self.folder), "run": str(run_dir)}
            for name, place in places.items():
                value = value.replace("{" + name + "}", place)
            return value
        if isinstance(value, dict):
            return {key: self._filled(item, run_dir) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled(item, run_dir) for item in value]
        return value

    def run(
        self,
        settings: Settings,
        *,
        steps: bool = True,
        policy_worker: type[PolicyWorker] = PolicyWorker,
        first_engine_dies: bool = False,
    ) -> Run:
        """A whole run, or (without `steps`) the start of its workers and their models."""
        key = json.dumps([sorted(settings.items()), steps, policy_worker.__name__, first_engine_dies], default=str)
        if key not in self._runs:
            self._num_runs += 1
            self._runs[key] = self._run(
                settings, self.folder / f"run_{self._num_runs}", steps, policy_worker, first_engine_dies
            )
        return self._runs[key]

    def _run(self, settings: Settings, folder: Path, steps: bool, policy_worker: type[PolicyWorker], dies: bool) -> Run:
        log: list[str] = []
        sink = logger.add(lambda message: log.append(message.record["message"]), level="INFO")
        experiment, error = None, ""
        with recording() as record:
            record.num_to_die = int(dies)
            try:
                kind = Distillation if "trainer.distillation.teachers" in settings else Experiment
                experiment = kind(self.config(settings, folder / "run"))
                experiment.policy_worker = policy_worker
                if steps:
                    experiment.run()
                else:
                    asyncio.run(_start(experiment))
            except (SkyRLError, RuntimeError, ValueError) as found:
                error = f"{type(found).__name__}: {found}"
            finally:
                with suppress(ValueError):  # whoever configures logging removes it
                    logger.remove(sink)
        return Run(folder, experiment, record, log, error)


async def _start(experiment: Experiment) -> None:
    trainer = await experiment._setup_trainer()
    await trainer.shutdown()


def digest(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:12] for name, t in tensors.items()}


# ---- where a difference is seen


def of_run(see: Callable[[Run], Any], *, steps: bool = True) -> See:
    """Seen after a run (or its start), which may have ended by an error only if `see` is `error`."""

    def seen(bench: Bench, settings: Settings) -> Any:
        run = bench.run(settings, steps=steps)
        assert see is _error or not run.error, run.error
        return see(run)

    return seen


def _error(run: Run) -> str:
    return run.error.replace(str(run.folder), "")


error = of_run(_error)
start_error = of_run(_error, steps=False)
metrics = of_run(lambda run: run.metrics)
trajectories = of_run(lambda run: run.trajectories)
files = of_run(lambda run: run.files)
log = of_run(lambda run: [line for line in run.log if "/" not in line])


def weights(name: str = "policy") -> See:
    """Return the trained weights."""

    def see(run: Run) -> Any:
        return digest(
            {
                key: gather_full_tensor(p.detach()).float()
                for key, p in run.worker(name).backend.model.named_parameters()
            }
        )

    return of_run(see)


def model(see: Callable[[Any], Any], name: str = "policy") -> See:
    """A property of a loaded model's worker."""
    return of_run(lambda run: see(run.worker(name)), steps=False)


def refusal(bench: Bench, settings: Settings) -> str:
    """The error of the settings."""
    try:
        validate_cfg(bench.config(settings))
    except ConfigError as found:
        return str(found)
    return ""
