"""Settings of a run that takes seconds, its prompts, and an environment that even random weights get rewards from."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import EnvSpec, registry


def merge_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`, section by section."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merge_settings(result[key], value) if isinstance(value, dict) and key in result else value
    return result


def write_prompts(path: Path, num_prompts: int = 16) -> str:
    """Write prompts of one user message each, `write 0` and so on. Returns: `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": [{"role": "user", "content": f"write {i}"}], "data_source": "toy"} for i in range(num_prompts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def make_tiny_run(run_dir: Path, model: str, prompts: str, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Make settings of an inline run on a CPU: two steps of four prompts, four answers each, two optimizer steps each.

    Args:
        changes: merged into them one after the other.
    """
    settings: dict[str, Any] = {
        "data": {"train_data": [prompts], "val_data": []},
        "environment": {"env_class": "different_characters"},
        "trainer": {
            "run_dir": str(run_dir),
            "policy": {"model": {"path": model}, "optimizer_config": {"lr": 1e-3}},
            "placement": {"device": "cpu", "launcher": "inline"},
            "bf16": False,
            "train_batch_size": 4,
            "policy_mini_batch_size": 2,
            "micro_train_batch_size_per_gpu": 4,
            "micro_forward_batch_size_per_gpu": 4,
            "max_training_steps": 2,
            "max_prompt_length": 64,
            "ckpt_interval": -1,
            "eval_interval": -1,
            "algorithm": {"use_kl_loss": False},
        },
        "generator": {
            "model_dtype": "float32",
            "n_samples_per_prompt": 4,
            "sampling_params": {"max_generate_length": 12},
        },
    }
    for change in changes:
        settings = merge_settings(settings, change)
    return settings


class DifferentCharacters(BaseTextEnv):
    """Environment of one turn that pays `reward`: the share of different characters in the answer."""

    def __init__(self, env_config: object = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        self.extras = extras or {}

    def reward(self, action: str) -> float:
        return len(set(action)) / max(1, len(action))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=self.reward(action), done=True, metadata={})


@contextmanager
def register_environments(**environments: type[BaseTextEnv]) -> Iterator[None]:
    """Register these environments by id within the block; existing ids are replaced and restored."""
    before = {name: registry[name] for name in environments if name in registry}
    registry.update({name: EnvSpec(name, environment) for name, environment in environments.items()})
    try:
        yield
    finally:
        for name in environments:
            registry.pop(name, None)
        registry.update(before)
