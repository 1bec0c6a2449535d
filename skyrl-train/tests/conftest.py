"""Tiny real things that many tests use: a model, a Ray cluster, the folder of real data."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads of one process fight over two cores

import pytest
import torch

torch.set_num_threads(1)

CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}:{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real public data; tests that need it are skipped where it is not."""
    default = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("SKYRL_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set SKYRL_TEST_DATA to a folder that has it")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of two layers and 64 words with random weights, as a folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny_qwen3"
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():  # far from uniform, so that log-probs differ enough to be worth comparing
        parameter.data.mul_(3.0)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of two layers with random weights and a tokenizer of one token a character, as a folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "chat"
    symbols = ["<pad>", "<end>", "<start>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<start>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(symbols),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def ray_cpu():
    """One Ray cluster on this machine for the whole session."""
    import ray

    from skyrl_train.utils.ray_cluster import worker_environment

    os.environ.update(RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", RAY_AUTH_MODE="disabled")
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": worker_environment()},
        object_store_memory=512 << 20,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
