"""Facts come from files of settings alone."""

import json
import subprocess
import sys

import pytest

from tx.errors import ConfigError
from tx.tinker.base_model import read_base_model

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 99,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_model_without_tokenizer_is_read(tmp_path):
    facts = read_base_model(write(tmp_path, config=CONFIG))
    assert facts.folder == tmp_path
    assert (facts.name, facts.vocab_size, facts.max_context) == (str(tmp_path), 99, 512)
    assert (facts.architecture, facts.tied_embeddings) == ("Qwen3ForCausalLM", False)
    assert facts.tokenizer_id is None


def test_base_model_config_reads_text_config_of_multimodal_model(tmp_path):
    text = {"vocab_size": 50, "max_position_embeddings": 64}
    facts = read_base_model(write(tmp_path, config={"architectures": ["X"], "text_config": text}))
    assert (facts.vocab_size, facts.max_context) == (50, 64)
    assert facts.tied_embeddings  # transformers' default where nothing is said


def test_saved_model_and_tokenizer_are_read(tiny_model):
    facts = read_base_model(str(tiny_model))
    assert (facts.vocab_size, facts.max_context) == (99, 512)
    assert facts.tokenizer_id == str(tiny_model)
    assert not facts.tied_embeddings


@pytest.mark.parametrize("missing", ["vocab_size", "max_position_embeddings"])
def test_incomplete_config_is_refused(tmp_path, missing):
    with pytest.raises(ConfigError, match=f"must define {missing}"):
        read_base_model(write(tmp_path, config={k: v for k, v in CONFIG.items() if k != missing}))


def test_missing_folder_or_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_base_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_base_model(str(tmp_path))
    for name in (str(tmp_path / "none"), "./none", "~/none-at-all", "a/b/c"):
        with pytest.raises(ConfigError, match="no folder"):
            read_base_model(name)


def test_reading_bodies_and_models_imports_no_torch():
    modules = "tx.tinker.base_model, tx.tinker.wire.schemas, tx.tinker.wire.checks, tx.tinker.wire.training_requests"
    code = (
        f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
