"""A worker whose model has adapters: they alone learn and are kept; they leave merged, or as peft reads them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.algorithms.reduction import token_weights
from skyrl_train.errors import CheckpointError
from skyrl_train.models.lora import find_adapters
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.weight_sync.base import WeightSyncInitInfo
from skyrl_train.weight_sync.fingerprint import differences, fingerprints_of
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.worker import CriticWorker, Worker
from skyrl_train_testing.weight_holders import WeightHolder, engines_in_threads
from skyrl_train_testing.weight_sources import send_once

IDS = torch.randint(2, 64, (3, 10), generator=torch.Generator().manual_seed(0))
MakeConfig = Callable[..., Any]


@pytest.fixture
def with_lora(config: Any, tiny_model: str) -> MakeConfig:
    """Settings of a policy and a critic with adapters of rank 4."""

    def make(**lora: Any) -> Any:
        model = {"model": {"path": tiny_model, "lora": {"rank": 4, "alpha": 8, **lora}}}
        return config(policy=model | dict(optimizer_config=dict(lr=1e-2)), critic=model)

    return make


@pytest.fixture
def start() -> Iterator[Callable[[Worker], Any]]:
    """Load a worker's model in this process, as the only rank."""
    started: list[Worker] = []

    def start(worker: Worker) -> Any:
        worker.init_model(RankInfo())
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.teardown()


def policy_of(cfg: Any) -> PolicyWorker:
    return PolicyWorker(cfg, PolicyLossRegistry.get("regular"), 10)


def take_step(worker: Worker, batch: TrainingInputBatch) -> dict[str, float]:
    full = TrainingInputBatch(dict(batch), metadata=batch.metadata)
    full["loss_weights"] = full["critic_loss_weights"] = token_weights(batch.tensor("loss_mask"), "token_mean")
    full["values"] = full["returns"] = batch.tensor("advantages")
    worker.load_batch(full)
    worker.forward_backward([MicroBatch(tuple(range(start, start + 4))) for start in range(0, len(batch), 4)])
    return worker.optim_step()


def snapshot(worker: Worker, *, trained: bool) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in worker.backend.model.named_parameters()
        if parameter.requires_grad == trained
    }


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_all_adapters_and_only_adapters_are_updated(with_lora, start, ragged_batch):
    worker = start(policy_of(with_lora()))
    frozen, exported = snapshot(worker, trained=False), worker.full_state()
    for _ in range(2):  # A gets a gradient once B is not 0
        before = snapshot(worker, trained=True)
        assert take_step(worker, ragged_batch())["grad_norm"] > 0
    assert len(before) == 2 * 14
    assert not any(torch.equal(now, before[name]) for name, now in snapshot(worker, trained=True).items())
    assert all(torch.equal(now, frozen[name]) for name, now in snapshot(worker, trained=False).items())
    for name, tensor in worker.full_state().items():
        assert torch.equal(tensor, exported[name]) != ("_proj" in name), name
    assert len(worker.backend.optimizer.state) == 2 * 14


def test_critic_head_is_trained_with_adapters(with_lora, start, ragged_batch):
    worker = start(CriticWorker(with_lora(), 10))
    before = snapshot(worker, trained=True)
    assert sorted(name for name in before if "lora_" not in name) == ["value_head.weight"]
    take_step(worker, ragged_batch())
    after = snapshot(worker, trained=True)
    assert not torch.equal(after["value_head.weight"], before["value_head.weight"])


@pytest.mark.first_case
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of forwards without a gradient
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_bfloat16_training_keeps_adapters_in_float32(with_lora, start, ragged_batch, use_reentrant):
    """Activations are recomputed in the backward (the default), in either of torch's ways."""
    cfg = with_lora()
    cfg.trainer.gradient_checkpointing_use_reentrant = use_reentrant
    worker = start(policy_of(cfg))
    expected = take_step(worker, ragged_batch())["grad_norm"]
    assert expected > 0.01
    cfg.trainer.bf16 = True
    worker.backend.load_model()
    assert take_step(worker, ragged_batch())["grad_norm"] == pytest.approx(expected, rel=0.2)
    assert {tensor.dtype for tensor in snapshot(worker, trained=True).values()} == {torch.float32}
    frozen = {tensor.dtype for tensor in worker.backend.model.parameters() if not tensor.requires_grad}
    assert frozen == {torch.bfloat16}, "half the memory of float32"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_bfloat16_frozen_base_is_bitwise_equal(with_lora, start, ragged_batch, tiny_model, monkeypatch, tmp_path):
    """Files in bfloat16, as models are published: mixed precision casts a base in float32 to the same values."""
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(tmp_path)
    cfg = with_lora()
    cfg.trainer.bf16, cfg.trainer.policy.model.path = True, str(tmp_path)
    grad_norms, exports = [], []
    for is_cast in (True, False):
        if not is_cast:
            monkeypatch.setattr(
                "skyrl_train.training_backends.fsdp2.backend.cast_frozen_parameters", lambda *_, **__: 0
            )
        worker = start(policy_of(cfg))
        grad_norms.append(take_step(worker, ragged_batch())["grad_norm"])
        exports.append(worker.full_state())
    assert grad_norms[0] == grad_norms[1]
    assert all(torch.equal(exported, exports[1][name]) for name, exported in exports[0].items())


@pytest.mark.parametrize("kind", [pytest.param("policy", marks=pytest.mark.slow), "critic"])
def test_step_is_independent_of_number_of_ranks(learners, with_lora, ragged_batch, kind):
    batch = ragged_batch()
    expected, step = (learners.step(kind, with_lora(), batch, num_ranks) for num_ranks in (1, 2))
    assert expected.grad_norm > 0.01
    assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert step.sums == {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in expected.sums.items()}
    for name, weight in expected.weights.items():
        assert (step.weights[name] - weight).abs().median() < 1e-5, name


def test_checkpoint_has_trained_weights_and_resumes_exactly(with_lora, start, ragged_batch, tmp_path):
    worker = start(policy_of(with_lora()))
    take_step(worker, ragged_batch())
    worker.save_checkpoint(str(tmp_path))
    names = {name for file in tmp_path.glob("state_*.safetensors") for name in load_file(file)}
    of_adapters = {name for adapter in find_adapters(worker.backend.transformer) for name in adapter.matrices}
    assert {name for name in names if "/" not in name} == of_adapters
    assert len(names) == 4 * len(of_adapters), "a weight, two moments, a number of steps"
    take_step(worker, ragged_batch())
    expected, merged = snapshot(worker, trained=True), worker.full_state()
    worker.backend.load_model()  # as at the start of another process
    assert not any(torch.equal(now, expected[name]) for name, now in snapshot(worker, trained=True).items())
    worker.load_checkpoint(str(tmp_path))
    take_step(worker, ragged_batch())
    assert all(torch.equal(now, expected[name]) for name, now in snapshot(worker, trained=True).items())
    assert all(torch.equal(now, merged[name]) for name, now in worker.full_state().items())


@pytest.mark.parametrize("lora", [{"rank": 2}, {"rank": 0}])
def test_checkpoint_of_other_adapters_is_refused(with_lora, start, tmp_path, lora):
    worker = start(policy_of(with_lora(target_modules=["q_proj"])))
    worker.save_checkpoint(str(tmp_path))
    worker.backend.cfg = with_lora(target_modules=["q_proj"], **lora)
    worker.backend.load_model()
    with pytest.raises(CheckpointError, match="does not fit this model"):
        worker.load_checkpoint(str(tmp_path))


def test_export_has_merged_weights_and_separate_adapter(
    with_lora, start, ragged_batch, tmp_path, tiny_model, chat_model
):
    worker = start(policy_of(with_lora()))
    take_step(worker, ragged_batch())
    worker.save_hf_model(str(tmp_path / "export"), AutoTokenizer.from_pretrained(chat_model))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    without = logits(base)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    assert (logits(adapted) - without).abs().max() > 0.01
    torch.testing.assert_close(logits(whole), logits(adapted), atol=1e-4, rtol=1e-5)
    merged = dict(adapted.merge_and_unload().named_parameters())  # type: ignore[operator]
    for name, tensor in worker.full_state().items():
        torch.testing.assert_close(tensor, merged[name].detach(), atol=1e-6, rtol=0)
        assert torch.equal(whole.get_parameter(name), tensor)


async def test_engine_receives_merged_weights(with_lora, start, ragged_batch, tiny_model):
    cfg = with_lora()
    cfg.generator.model_dtype = "float32"
    worker = start(policy_of(cfg))
    take_step(worker, ragged_batch())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    holder = WeightHolder((name, parameter.data) for name, parameter in model.named_parameters())
    before = logits(model)
    await send_once(worker, engines_in_threads([holder]), [WeightSyncInitInfo(transport="shared_memory")])
    assert holder.version == 1
    after = logits(model)
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after, logits_of_worker(worker), atol=1e-4, rtol=1e-5)


def test_adapters_are_written_alone_with_fingerprints(with_lora, start, ragged_batch, tiny_model, tmp_path):
    """Adapters are written in the engines' dtype, under the version's number; peft then makes the policy of the plain
    model."""
    cfg = with_lora()
    cfg.generator.model_dtype = "float32"
    cfg.generator.weight_sync_directory = str(tmp_path)
    worker = start(policy_of(cfg))
    take_step(worker, ragged_batch())
    fingerprints = worker.write_adapters(3)
    tensors = load_file(tmp_path / "adapters" / "3" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 14
    assert differences(fingerprints, fingerprints_of(tensors.items(), 3, "sampled")) == ""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapters" / "3"))
    torch.testing.assert_close(logits(adapted), logits_of_worker(worker), atol=1e-4, rtol=1e-5)


def logits_of_worker(worker: PolicyWorker) -> torch.Tensor:
    """Compute the logits of the model with its adapters beside the weights, written out."""
    model = AutoModelForCausalLM.from_pretrained(worker.backend.settings.model.path, dtype=torch.float32)
    for adapter in find_adapters(worker.backend.transformer):
        with torch.no_grad():
            delta = adapter.scaling * adapter.b.full_tensor() @ adapter.a.full_tensor()  # type: ignore[attr-defined]
            model.get_parameter(f"{adapter.layer}.weight").add_(delta)
    return logits(model)
