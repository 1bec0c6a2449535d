"""Files of a worker: weights from rank 0 alone, exports that are whole or absent, checkpoints."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_gym.whole_folders import replacing
from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.errors import CheckpointError
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.training_backends.checkpoint import FileRecord
from skyrl_train.training_backends.optimizer import move_optimizer_state
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.utils.io import compute_sha256
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import CriticWorker, RefWorker, Worker
from skyrl_train_testing.rank_processes import ForkedRanks

Start = Callable[[Worker], Any]


@pytest.fixture
def start() -> Iterator[Start]:
    """Workers as plain objects, each the only rank of its model."""

    def begin(worker: Worker) -> Worker:
        if dist.is_initialized():
            worker.backend.load_model()
        else:
            worker.init_model(RankInfo())
        return worker

    yield begin
    dist.destroy_process_group()


def make_policy(cfg: Any) -> PolicyWorker:
    return PolicyWorker(cfg, PolicyLossRegistry.get("regular"), 10)


def scores(worker: Worker, batch: TrainingInputBatch) -> torch.Tensor:
    return worker.forward(batch, [MicroBatch(tuple(range(len(batch))))]).tensor("output")


def learn(worker: Worker, batch: TrainingInputBatch) -> dict[str, float]:
    """One optimizer step towards rewarding everything; its metrics."""
    ones = torch.ones_like(batch.tensor("loss_mask"))
    columns = dict(advantages=ones, returns=ones, values=ones, loss_weights=ones, critic_loss_weights=ones)
    worker.load_batch(TrainingInputBatch(dict(batch) | columns, metadata=batch.metadata))
    worker.forward_backward([MicroBatch(tuple(range(len(batch))))])
    return worker.optim_step()


# ---- loading


def test_policy_and_reference_score_at_sampling_temperature(start, config, ragged_batch, tiny_model):
    cfg, batch = config(), ragged_batch(3)
    cfg.generator.sampling_params.temperature = 0.7
    policy, ref = start(make_policy(cfg)), start(RefWorker(cfg))
    sequences, mask = batch.tensor("sequences"), batch.tensor("attention_mask")
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    logits = model(input_ids=sequences, attention_mask=mask, position_ids=positions).logits
    expected = (logits / 0.7).log_softmax(-1)[:, :-1].gather(-1, sequences[:, 1:, None])[:, -7:, 0]
    written = mask[:, -7:] == 1
    assert torch.equal(scores(policy, batch), scores(ref, batch))
    torch.testing.assert_close(scores(ref, batch)[written], expected[written], atol=1e-5, rtol=0)


def test_log_probs_of_fixed_tokens_use_temperature_1(start, config, tiny_model):
    cfg = config()
    cfg.generator.sampling_params.temperature = 0.7
    prompts = [[3, 4, 5, 6], [9, 8, 7, 2]]
    found = start(make_policy(cfg)).log_probs_of_tokens(prompts)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny_model)(torch.tensor(prompts)).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(prompts)[:, 1:, None])[..., 0]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_two_ranks_hold_weights_read_by_rank_0(learners, config, tiny_model, kind):
    async def weights() -> dict[str, torch.Tensor]:
        group = await learners.group(kind, config(), 2)
        first, second = await group.call_all(Worker.full_state)
        assert not second
        return first

    stored = load_file(f"{tiny_model}/model.safetensors")
    held = asyncio.run(weights())
    assert held.pop("value_head.weight", None) is not None or kind == "policy"
    names = {name if kind == "policy" else f"model.{name}": tensor for name, tensor in held.items()}
    assert names.keys() == stored.keys()
    assert all(torch.equal(names[name], tensor) for name, tensor in stored.items())


def test_reference_update_copies_current_policy(start, config, ragged_batch, chat_model, tmp_path):
    cfg, batch = config(), ragged_batch(4)
    policy = start(make_policy(cfg))
    learn(policy, batch)
    expected = scores(policy, batch)
    policy.save_hf_model(str(tmp_path / "policy"), AutoTokenizer.from_pretrained(chat_model))
    ref = start(RefWorker(cfg))
    assert not torch.equal(scores(ref, batch), expected)
    ref.load_weights(str(tmp_path / "policy"))
    assert torch.equal(scores(ref, batch), expected)

    async def scored_by_two() -> torch.Tensor:
        ranks = ForkedRanks("ref", RefWorker, (cfg,), num_ranks=2, log_folder=tmp_path)
        group = ActorGroup("ref", ranks, device="cpu", timeout_seconds=120)
        try:
            await group.init_model()
            await group.call_all(RefWorker.load_weights, str(tmp_path / "policy"))
            first, _ = await group.call_all(RefWorker.forward, batch, [MicroBatch((0, 1, 2, 3))])
            return first.tensor("output")
        finally:
            group.kill()

    assert torch.equal(asyncio.run(scored_by_two()), expected)


# ---- exports and checkpoints


def test_export_is_loadable_by_transformers(start, config, ragged_batch, chat_model, tmp_path):
    policy, batch = start(make_policy(config())), ragged_batch(4)
    learn(policy, batch)
    policy.save_hf_model(str(tmp_path / "policy"), AutoTokenizer.from_pretrained(chat_model))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    for name, tensor in policy.full_state().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token == "<end>"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_critic_loads_exported_critic(start, config, ragged_batch, chat_model, tmp_path):
    critic, batch = start(CriticWorker(config(), 10)), ragged_batch(4)
    learn(critic, batch)
    critic.save_hf_model(str(tmp_path / "critic"), AutoTokenizer.from_pretrained(chat_model))
    again = start(CriticWorker(config(critic={"model": {"path": str(tmp_path / "critic")}}), 10))
    assert torch.equal(scores(again, batch), scores(critic, batch))


def test_failed_export_keeps_previous_export(start, config, chat_model, tmp_path):
    class FullDisk:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left on device")

    policy = start(make_policy(config()))
    policy.save_hf_model(str(tmp_path / "policy"), AutoTokenizer.from_pretrained(chat_model))
    before = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
    with pytest.raises(CheckpointError, match="no space"):
        policy.save_hf_model(str(tmp_path / "policy"), FullDisk())
    assert {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_export_folder_is_absent_until_complete(tmp_path):
    place = tmp_path / "export"
    (tmp_path / "export.partial").mkdir()  # of a process that was killed while it wrote
    (tmp_path / "export.partial" / "half").write_text("a tensor that")
    with replacing(place) as folder:
        (folder / "model").write_text("all of it")
        assert not place.exists()
    assert [path.name for path in place.iterdir()] == ["model"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_checkpoint_restores_weights_and_optimizer(start, config, ragged_batch, tmp_path, kind):
    def make() -> Worker:
        return start(make_policy(config()) if kind == "policy" else CriticWorker(config(), 10))

    batch = ragged_batch(4)
    first = make()
    learn(first, batch)
    report = first.save_checkpoint(str(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert report.files == {path.name: FileRecord(path.stat().st_size, compute_sha256(path)) for path in files}
    learn(first, batch)
    again = make()
    again.load_checkpoint(str(tmp_path))
    learn(again, batch)
    assert torch.equal(scores(again, batch), scores(first, batch))


def test_optimizer_settings_are_from_resuming_run(start, config, ragged_batch, tmp_path):
    """The linear schedule over 10 steps gives 1.0, 0.9, 0.8 … of the learning rate."""

    def make(**optimizer: Any) -> Worker:
        return start(make_policy(config(policy={"optimizer_config": optimizer | {"scheduler": "linear"}})))

    batch = ragged_batch(4)
    first = make(lr=1e-2)
    learn(first, batch)
    first.save_checkpoint(str(tmp_path))
    again = make(lr=1e-3, weight_decay=0.5, adam_betas=[0.8, 0.9])
    again.load_checkpoint(str(tmp_path))
    [group] = again.backend.optimizer.param_groups
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.9))
    assert [learn(again, batch)["policy_lr"] for _ in range(2)] == pytest.approx([9e-4, 8e-4])


# ---- making room


def test_optimizer_state_moves_except_step_counts():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    move_optimizer_state(optimizer, torch.device("meta"))
    for state in optimizer.state.values():
        assert {name: value.device.type for name, value in state.items()} == {
            "step": "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }


def test_offloading_between_steps_keeps_results_on_cpu(start, config, ragged_batch):
    batch, kept = ragged_batch(4), []
    for offloads in (False, True):
        policy = start(make_policy(config()))
        for _ in range(2):
            learn(policy, batch)
            if offloads:
                policy.offload_to_cpu()
                policy.backload_to_gpu()
        kept.append(scores(policy, batch))
    assert torch.equal(*kept)


@pytest.mark.gpu
def test_offloading_frees_gpu_memory_and_keeps_results(config, ragged_batch):
    batch = ragged_batch(4)
    worker = make_policy(config())
    worker.init_model(RankInfo(device="cuda:0"))
    try:
        learn(worker, batch)
        before, used = scores(worker, batch), torch.cuda.memory_allocated()
        worker.offload_to_cpu()
        tensors = [
            *worker.backend.model.parameters(),
            *(v for s in worker.backend.optimizer.state.values() for v in s.values()),
        ]
        assert {tensor.to_local().device.type for tensor in tensors if tensor.dim()} == {"cpu"}
        # Kernels' workspaces stay, and are larger than this model.
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim())
        assert used - torch.cuda.memory_allocated() >= num_bytes
        worker.backload_to_gpu()
        assert torch.equal(scores(worker, batch), before)
        learn(worker, batch)
    finally:
        dist.destroy_process_group()


def test_parameters_after_forward_are_float32_masters(start, config):
    """`reshard_after_forward=false` leaves the model in the copy that it computes with, in bfloat16."""
    cfg = config(bf16=True)
    cfg.trainer.policy.fsdp_config.reshard_after_forward = False
    policy = start(make_policy(cfg))
    before = {name: tensor.clone() for name, tensor in policy.backend.gather_parameters()}
    state = {name: tensor.clone() for name, tensor in policy.backend.training_state()}
    policy.log_probs_of_tokens([[3, 4, 5, 6]])
    after = dict(policy.backend.gather_parameters())
    assert any(not tensor.bfloat16().float().equal(tensor) for tensor in before.values())
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    assert all(tensor.equal(state[name]) for name, tensor in policy.backend.training_state())
