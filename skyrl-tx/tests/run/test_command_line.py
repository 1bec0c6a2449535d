"""Settings from the command line and the environment."""

from pathlib import Path

import pytest

from tx.errors import ConfigError
from tx.tinker.command_line import read_config
from tx.tinker.config import EngineConfig


def test_every_settings_field_is_option():
    argv = ["--base-model", "tiny", "--port", "0", "--served-model-name", "a", "--served-model-name", "b"]
    argv += ["--backend-config", '{"dtype": "float32"}', "--state-dir", "/x", "--session-timeout-sec", "-1"]
    config = read_config(argv, {})
    assert config.port == 0
    assert config.served_names == ["tiny", "a", "b"]
    assert config.backend_config == {"dtype": "float32"}
    assert config.state_dir == Path("/x")
    assert config.session_timeout_sec == -1


def test_command_line_precedes_environment_and_default():
    env = {"TX_PORT": "9000", "TX_HOST": "localhost", "TX_BASE_MODEL": "tiny"}
    config = read_config(["--port", "9001"], env)
    assert (config.port, config.host, config.base_model) == (9001, "localhost", "tiny")
    assert config.checkpoints_base == EngineConfig(base_model="x").checkpoints_base


def test_environment_accepts_lists_and_objects():
    env = {"TX_SERVED_MODEL_NAME": "a, b,", "TX_BACKEND_CONFIG": '{"a": 1}', "TX_DATABASE_URL": "sqlite:///x.db"}
    config = read_config(["--base-model", "tiny"], env)
    assert config.served_model_name == ["a", "b"]
    assert config.backend_config == {"a": 1}
    assert config.store_url == "sqlite:///x.db"


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "--base-model"),
        (["--base-model", ""], "--base-model: "),
        (["--base-model", "x", "--prot", "1"], "--port"),
        (["--base-model", "x", "--por", "1"], "--port"),
        (["--base-model", "x", "--external-inference-url=y"], "--external-inference-url"),
        (["--base-model", "x", "--port", "many"], "--port: .*'many'"),
        (["--base-model", "x", "--port", "65536"], "--port: .*65535"),
        (["--base-model", "x", "--port", "-1"], "--port"),
        (["--base-model", "x", "--backend", "jax"], "--backend: .*'torch'.*'jax'"),
        (["--base-model", "x", "--backend-config", "{"], "--backend-config"),
        (["--base-model", "x", "--backend-config", "[1]"], "--backend-config"),
        (["x"], "unexpected argument 'x'"),
        (["--base-model"], "--base-model"),
    ],
)
def test_wrong_command_line_is_explained(argv, says):
    with pytest.raises(ConfigError, match=says):
        read_config(argv, {})


def test_wrong_environment_value_is_named_by_variable():
    with pytest.raises(ConfigError, match="TX_PORT: "):
        read_config(["--base-model", "x"], {"TX_PORT": "many"})
    with pytest.raises(ConfigError, match="TX_BACKEND_CONFIG must"):
        read_config(["--base-model", "x"], {"TX_BACKEND_CONFIG": "1"})


def test_help_lists_every_option_with_default(capsys):
    with pytest.raises(SystemExit):
        read_config(["--help"], {})
    text = " ".join(capsys.readouterr().out.split())
    for name in EngineConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert "Default 8000." in text
