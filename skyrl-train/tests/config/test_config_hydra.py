"""Hydra on top of the settings, as users start it: a program of their own, a command line, a YAML file."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging
import hydra
from skyrl_train.config import SkyRLConfig, config_dir, register_config_store
from skyrl_train.errors import ConfigError

register_config_store()

@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg):
    logging.getLogger(__name__).info("started")
    try:
        config = SkyRLConfig.from_dict(cfg)
    except ConfigError as error:
        print("refused:", error)
        return
    print("seeds", config.trainer.seed, config.generator.seed, "model", config.generator.model_name)
    print("engine", config.generator.engine_init_kwargs, "gym", config.environment.skyrl_gym.env_configs)

main()
"""

USER_YAML = """
defaults: [ppo_base_config, _self_]
hydra:
  searchpath: [pkg://skyrl_train.config]
trainer:
  seed: 9
  policy: {model: {path: /models/tiny}}
"""


@pytest.fixture
def start(tmp_path):
    """Run the program with arguments in an empty folder. Returns: its output."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "mine.yaml").write_text(USER_YAML)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "program.py", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout + done.stderr

    return run


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_overrides_reach_interpolated_settings_without_writing_files(start, tmp_path):
    before = files_in(tmp_path)
    printed = start(
        "trainer.seed=5",
        "trainer.policy.model.path=/models/x",
        "+generator.engine_init_kwargs.max_model_len=64",
        "environment.skyrl_gym.multiply.digits=3",
    )
    assert "seeds 5 5 model /models/x" in printed
    assert "engine {'max_model_len': 64} gym {'multiply': {'digits': 3}}" in printed
    assert files_in(tmp_path) == before


@pytest.mark.slow
def test_user_yaml_extends_defaults(start):
    assert "seeds 9 9 model /models/tiny" in start("--config-dir", "settings", "--config-name", "mine")


def test_misspelt_override_suggests_nearest_name(start):
    printed = start("trainer.algorithm.eps_clp_high=0.28")
    assert (
        "refused: unknown setting trainer.algorithm.eps_clp_high; did you mean trainer.algorithm.eps_clip_high?"
        in printed
    )


@pytest.mark.slow
def test_cfg_job_prints_settings_without_starting_run(start):
    printed = start("trainer.seed=5", "--cfg", "job")
    assert "  seed: 5" in printed and "model_name: ${trainer.policy.model.path}" in printed
    assert "seeds" not in printed and "hydra" not in printed
