"""A path that names no model, and answers that no context holds, are refused in one line before anything starts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.model_files import check_models, load_tokenizer
from skyrl_train.errors import ConfigError
from skyrl_train.utils.ray_cluster import start_ray
from skyrl_train_testing.tiny_models import build_character_tokenizer


def config(path: str, sampling: dict[str, Any] | None = None, **generator: Any) -> SkyRLConfig:
    generator["sampling_params"] = {"max_generate_length": 100} | (sampling or {})
    trainer = {"policy": {"model": {"path": path}}, "max_prompt_length": 64, "algorithm": {"use_kl_loss": False}}
    return SkyRLConfig.from_dict({"trainer": trainer, "generator": generator})


@pytest.mark.parametrize(
    "path, words",
    [
        ("/nowhere/model", "no such folder \\(looked for /nowhere/model"),
        ("./a/b/c", "no such folder"),
        ("{folder}/empty", "is not a model: the folder has no config.json; it contains readme.md"),
        ("{folder}/file.bin", "is a file; use the model's folder"),
        ("{folder}/broken", "the config in this folder cannot be loaded: "),
        (
            "nobody/no-such-model",
            "is not a local folder, and cannot be loaded from the Hugging Face hub: .*HF_HUB_OFFLINE",
        ),
    ],
)
def test_path_without_model_gives_single_line_error(path: str, words: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("empty", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty" / "readme.md").touch()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "file.bin").touch()
    with pytest.raises(ConfigError, match=f"^trainer.policy.model.path=.*{words}") as error:
        check_models(config(path.format(folder=tmp_path)))
    assert len(str(error.value).splitlines()) == 1


def test_model_without_tokenizer_gives_single_line_error(chat_model: str, tmp_path: Path):
    shutil.copy(Path(chat_model) / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert len(str(error.value).splitlines()) == 1
    assert load_tokenizer(chat_model).pad_token is not None


@pytest.mark.parametrize("make", [Qwen2Config, Qwen3Config])
def test_tokenizer_loaded_with_wrong_class_is_rejected(tmp_path: Path, make: Any):
    build_character_tokenizer().save_pretrained(tmp_path)
    make(vocab_size=99).save_pretrained(tmp_path)
    if make is Qwen3Config:
        tokenizer = load_tokenizer(str(tmp_path))
        assert tokenizer.decode(tokenizer("a b", add_special_tokens=False)["input_ids"]) == "a b"
        return
    with pytest.raises(ConfigError, match=r"trainer\.policy\.model\.path.*Qwen2Tokenizer.*model_type.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_without_words_is_rejected(tmp_path: Path):
    """A vocabulary of words that the tokenizer never splits texts into."""
    words = {word: id for id, word in enumerate(["<pad>", "<end>", *(f"w{number}" for number in range(97))])}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>").save_pretrained(tmp_path)
    Qwen3Config(vocab_size=99).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.policy\.model\.path.* loses text: .* becomes 1 tokens"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_of_larger_vocabulary_is_rejected(tmp_path: Path):
    tokenizer = build_character_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<image>"])  # not in the template: as Gemma 3's, whose text models have no such embedding
    tokenizer.save_pretrained(tmp_path)
    Qwen3Config(vocab_size=size).save_pretrained(tmp_path)
    assert len(load_tokenizer(str(tmp_path))) == size + 1
    tokenizer.pad_token = "<image>"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"1 tokens .*'<image>'.* vocab_size={size} "):
        load_tokenizer(str(tmp_path))
    Qwen3Config(vocab_size=size - 9).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"10 tokens .*resize"):
        load_tokenizer(str(tmp_path))


def test_responses_longer_than_context_are_rejected(chat_model: str):
    check_models(config(chat_model, {"max_generate_length": 255}))  # 256 positions
    rule = (
        r"sampling_params.max_generate_length=300 must be below the model's context of 256 tokens .* at most 192 always"
    )
    with pytest.raises(ConfigError, match=rule):
        check_models(config(chat_model, {"max_generate_length": 300}))
    short = {"max_generate_length": 100}
    check_models(
        config(chat_model, {"max_generate_length": 300}, eval_sampling_params=short), ("eval_sampling_params",)
    )
    with pytest.raises(ConfigError, match=r"context of 90 tokens .generator.engine_init_kwargs.max_model_len"):
        check_models(config(chat_model, engine_init_kwargs={"max_model_len": 90}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_gpu_is_rejected_before_ray_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    cfg = SkyRLConfig.from_dict({"trainer": {"placement": {"device": "cuda"}}})
    with pytest.raises(ConfigError, match=r"placement\.device=cuda"):
        start_ray(cfg)
