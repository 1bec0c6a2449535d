"""A model whose ranks share sequences and divide its weights scores and learns as one process does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from skyrl_train.config import FSDPConfig, LoRAConfig
from skyrl_train.distributed.process_group import build_mesh
from skyrl_train.distributed.sharded_tensor import gather_full_tensor
from skyrl_train.distributed.ulysses import SequenceParallel, build_sequence_parallel
from skyrl_train.models.adapter_files import WEIGHTS_FILE, gather_adapter_tensors, write_adapter_version
from skyrl_train.models.lora import add_adapters, find_adapters, gather_exported_parameters
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.training_backends.fsdp2.sharding import clip_grad_norm, shard_model
from skyrl_train_testing.tiny_models import build_tiny_qwen3

NUM_PROMPT, NUM_RESPONSE = 4, 5


def tiny(**settings: Any) -> Qwen3ForCausalLM:
    return build_tiny_qwen3(
        hidden_size=16, scale=3.0, vocab_size=32, max_position_embeddings=32, tie_word_embeddings=False, **settings
    ).train()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 9, 5, 2 and 7 tokens: 23, so that neither 2 nor 4 ranks share them without filler."""
    generator = torch.Generator().manual_seed(1)
    sequences = torch.randint(2, 32, (4, NUM_PROMPT + NUM_RESPONSE), generator=generator)
    mask = torch.ones_like(sequences)
    for row, (left, right) in enumerate([(0, 0), (2, 2), (3, 4), (0, 2)]):
        mask[row, :left] = 0
        mask[row, NUM_PROMPT + NUM_RESPONSE - right :] = 0
    assert mask.sum() == 23
    return sequences, mask


def learn(causal_lm: Any, ranks: SequenceParallel | None, rows: slice, sharded: bool) -> dict[str, Any]:
    """Scores rows, adds the gradient of a loss that weighs every token differently, and takes a step."""
    model = ScoringModel(causal_lm, chunk_size=3, sequence_parallel=ranks)
    world_size = 1
    if sharded:
        world_size = dist.get_world_size()
        shard_model(model, build_mesh(torch.device("cpu")), FSDPConfig(), bf16=False)
    sequences, mask = batch()
    scores = model(sequences[rows], mask[rows], NUM_RESPONSE, 0.7, with_entropy=True)
    weights = torch.arange(4.0 * NUM_RESPONSE).view(4, NUM_RESPONSE)[rows]
    (world_size * (weights * (scores.log_probs + 0.3 * scores.entropy)).sum()).backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = {n: gather_full_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = clip_grad_norm(trained, 1e9)
    torch.optim.SGD(trained, lr=0.01).step()
    return {
        "log_probs": scores.log_probs.detach(),
        "entropy": scores.entropy.detach(),
        "norm": norm,
        "gradients": gradients,
        "weights": {name: tensor.clone() for name, tensor in gather_exported_parameters(model)},
    }


def with_adapters() -> Qwen3ForCausalLM:
    model = tiny()
    torch.manual_seed(0)
    add_adapters(model, LoRAConfig(rank=2, alpha=4))
    generator = torch.Generator().manual_seed(2)
    for adapter in find_adapters(model):
        adapter.b.data.normal_(generator=generator).mul_(0.3)
    return model


def learn_on_ranks(sizes: tuple[int, ...], model: Callable[[], Any]) -> list[dict[str, Any]]:
    """Run with each number of ranks that share a sequence, on this rank."""
    results = []
    for size in sizes:
        rows = 4 * size // dist.get_world_size()
        shard = dist.get_rank() // size
        ranks = build_sequence_parallel(size)
        results.append(learn(model(), ranks, slice(shard * rows, (shard + 1) * rows), sharded=True))
    return results


@pytest.mark.parametrize(
    "model, num_ranks, sizes",
    [pytest.param(tiny, 4, (4, 2), marks=pytest.mark.full), (with_adapters, 2, (2, 1))],
    ids=["all weights", "adapters on frozen weights"],
)
def test_sequence_parallel_and_sharding_preserve_scores_and_gradients(run_on_ranks, model, num_ranks, sizes):
    expected = learn(model(), None, slice(None), sharded=False)
    untrained = dict(gather_exported_parameters(model()))
    of_ranks = run_on_ranks(num_ranks, learn_on_ranks, sizes, model)
    assert expected["norm"] > 1
    assert len(expected["gradients"]) == (2 * 14 if model is with_adapters else len(untrained))
    for size, results in zip(sizes, zip(*of_ranks, strict=True), strict=True):
        for name in ("log_probs", "entropy"):
            whole = torch.cat([result[name] for result in results[::size]])
            torch.testing.assert_close(whole, expected[name], atol=1e-5, rtol=1e-5)
        for result in results:
            assert result["norm"] == results[0]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
            for kind in ("gradients", "weights"):
                assert set(result[kind]) == set(expected[kind])
                for name, tensor in expected[kind].items():
                    torch.testing.assert_close(result[kind][name], tensor, atol=1e-5 * expected["norm"], rtol=1e-5)
            for name, tensor in result["weights"].items():
                learnt = model is tiny or "_proj" in name
                assert torch.equal(tensor, untrained[name]) != learnt, name


def write_adapters_on_ranks(folder: Path) -> int:
    model = shard_model(with_adapters(), build_mesh(torch.device("cpu")), FSDPConfig(), bf16=False)
    return len(write_adapter_version(model, folder, 1, torch.float32, rank=dist.get_rank()))


def test_two_ranks_write_same_adapters_as_one(run_on_ranks, tmp_path):
    expected = dict(gather_adapter_tensors(with_adapters(), torch.float32))
    assert run_on_ranks(2, write_adapters_on_ranks, tmp_path) == [len(expected), 0]
    written = load_file(tmp_path / "1" / WEIGHTS_FILE)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
