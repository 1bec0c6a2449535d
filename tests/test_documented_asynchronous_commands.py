"""Commands of asynchronous training as the documentation gives them: the laptop's is run, the README's is validated."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.validation import validate_cfg
from skyrl_train.errors import ConfigError
from skyrl_train.utils.run_folder import RunFolder

ROOT = Path(__file__).parents[1]


def documented_command(page: str, program: str) -> list[str]:
    """Return the words of the command of a page that runs this program and trains asynchronously."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    [command] = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if program in line and "fully_async.enabled=true" in line
    ]
    return shlex.split(command)


def settings_of(overrides: list[str]) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.from_dotlist(overrides))
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def readme_overrides() -> list[str]:
    return [word for word in documented_command("README.md", "main_base") if re.match(r"[a-z_]+\..*=", word)]


def test_readme_command_is_valid_and_minimal():
    overrides = readme_overrides()
    cfg = validate_cfg(SkyRLConfig.from_dict(settings_of(overrides)))
    assert cfg.trainer.fully_async.enabled and cfg.trainer.fully_async.max_staleness_steps == 4
    for name in ("colocate_all", "policy_loss_type"):
        with pytest.raises(ConfigError, match=name):
            validate_cfg(SkyRLConfig.from_dict(settings_of([each for each in overrides if name not in each])))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_documented_quickstart_trains_asynchronously(tmp_path: Path):
    """Two steps of the laptop's command, of a model without its warm-up."""
    *uv_run, script = (words := documented_command("docs/asynchronous.md", "examples/quickstart/run.py"))[:3]
    assert uv_run == ["uv", "run"] and script == "examples/quickstart/run.py"
    words = words[2:]
    words[words.index("--output") + 1] = str(tmp_path)

    def run(*arguments: str) -> None:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    run("examples/quickstart/model.py", "--output", str(tmp_path / "model"), "--task", "arithmetic", "--seed", "0")
    run(*words, "trainer.max_training_steps=2")
    rows = [row for row in RunFolder(tmp_path / "run").read_metrics() if "async/staleness_max" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["async/staleness_max"] <= 1 for row in rows)
    assert (tmp_path / "run" / "learning_curve.png").exists()
