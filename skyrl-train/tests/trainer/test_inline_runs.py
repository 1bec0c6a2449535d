"""`trainer.placement.launcher=inline`: the same run in one process, without Ray."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train import trainer
from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.errors import WorkerError
from skyrl_train.memory_plan.decisions import CHECKPOINTING, OFFLOAD, MemoryDecision
from skyrl_train.models import causal_lm
from skyrl_train.orchestration.inline_launcher import model_thread
from skyrl_train.training_backends.fsdp2.backend import FSDP2Backend
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import DifferentCharacters, register_environments

INLINE = {"trainer": {"placement": {"launcher": "inline"}}}
MODELS = {
    "trainer": {
        # Adapters and the value head are initialized from each worker's own random numbers.
        "policy": {"model": {"lora": {"rank": 4}}},
        "algorithm": {
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "advantage_estimator": "gae",
        },
        "critic_mini_batch_size": 2,
        "hf_save_interval": 2,
        "gradient_checkpointing": False,
    },
    "generator": {"num_inference_engines": 2},
}


@pytest.fixture(autouse=True, scope="module")
def one_process_group() -> None:
    """None: each run here has a group of its own, as in a process of its own."""


def result_of(cfg: SkyRLConfig) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The metrics of each step without times, and the weights that the run exported."""
    folder = RunFolder(cfg.trainer.run_dir)
    steps = [
        {
            name: value
            for name, value in row.items()
            if name != "time" and "seconds" not in name and not name.startswith(("timing/", "memory/", "engines/"))
        }
        for row in folder.read_metrics()
    ]
    weights = {
        f"{file.parent.name}/{name}": tensor
        for file in sorted(folder.path.rglob("exports/*/*/model.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return steps, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [pytest.param({"trainer": {"hf_save_interval": 2}}, marks=pytest.mark.full), MODELS],
    ids=["policy", "critic, reference, adapters"],
)
def test_inline_run_is_bitwise_equal_to_run_under_ray(
    changes: dict[str, Any], settings: Any, merged: Any, run: Any, chat_model: str, tmp_path: Path
):
    if changes is MODELS:
        changes = merged(changes, {"trainer": {"critic": {"model": {"path": chat_model}}}})
    under_ray = settings(tmp_path / "ray", merged(changes, {"trainer": {"placement": {"launcher": "ray"}}}))
    run(under_ray)
    inline = settings(tmp_path / "inline", merged(changes, INLINE))
    state = torch.get_rng_state()
    BasePPOExp(inline).run()
    assert torch.equal(torch.get_rng_state(), state), "the driver's random numbers are its own"
    (expected, weights), (steps, own_weights) = result_of(under_ray), result_of(inline)
    assert len(steps) == 2 and len(weights) > 10
    assert steps == expected
    assert all(step["generate/weight_version_lag_max"] == 0 for step in steps), (
        "trained on by the weights that wrote it"
    )
    assert weights.keys() == own_weights.keys()
    assert all(torch.equal(own_weights[name], tensor) for name, tensor in weights.items())


OFFLOADS = {"keep": set(), "optimizer": {"offload_optimizer", "onload"}, "all": {"offload", "onload"}}
"""Forced mode -> moves that reach training backends."""


def test_offload_mode_moves_its_part_and_keeps_results(
    settings: Any, merged: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with_reference = {"trainer": {"algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1}, "hf_save_interval": 2}}
    calls: set[str] = set()
    for name in ("offload", "offload_optimizer", "onload"):
        method = getattr(FSDP2Backend, name)
        monkeypatch.setattr(FSDP2Backend, name, lambda self, name=name, method=method: calls.add(name) or method(self))
    outcomes = {}
    for mode in ("auto", *OFFLOADS):
        forced = {"trainer": {"placement": {"launcher": "inline", "offload": mode}}}
        cfg = settings(tmp_path / mode, merged(with_reference, forced))
        # With a mode that is set, moves are those of a GPU.
        monkeypatch.setattr(FSDP2Backend, "frees_device", mode != "auto")
        calls.clear()
        BasePPOExp(cfg).run()
        outcomes[mode] = result_of(cfg)
        assert calls == OFFLOADS.get(mode, OFFLOADS["all"])
        moved = [row.get("memory/offload_gb", 0.0) for row in RunFolder(cfg.trainer.run_dir).read_metrics()]
        assert all(size > 0 for size in moved) == (mode in ("optimizer", "all"))
    (expected, weights), *others = outcomes.values()
    for steps, own_weights in others:
        assert steps == expected
        assert weights and all(torch.equal(own_weights[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("is_on", [True, False])
def test_workers_use_chosen_checkpointing(settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_on: bool):
    """The planner chooses on GPUs alone: its choice is given here."""
    enabled: list[object] = []
    monkeypatch.setattr(causal_lm, "enable_gradient_checkpointing", lambda model, **_: enabled.append(model))
    chosen = MemoryDecision({OFFLOAD: "all", CHECKPOINTING: is_on}, {CHECKPOINTING: "given"})
    monkeypatch.setattr(trainer, "decide_memory_of_run", lambda cfg: chosen)
    cfg = settings(tmp_path, {"trainer": {"gradient_checkpointing": "auto", "max_training_steps": 1}})
    BasePPOExp(cfg).run()
    assert bool(enabled) == is_on


class Stops(DifferentCharacters):
    """Environment with a breakpoint where it computes the reward."""

    def reward(self, action: str) -> float:
        reward = super().reward(action)
        breakpoint()
        return reward


def loss_that_stops(log_probs: Any, old_log_probs: Any, advantages: Any, *_: Any) -> Any:
    """The policy gradient, with a breakpoint."""
    loss = -log_probs * advantages
    breakpoint()
    return loss, {}


def loss_that_fails(*_: Any) -> Any:
    raise KeyError("my bug")


@contextmanager
def policy_loss(name: str, loss: Any) -> Iterator[dict[str, Any]]:
    """Settings with a registered loss of a user's own."""
    PolicyLossRegistry.register(name, loss)
    try:
        yield {"trainer": {**INLINE["trainer"], "algorithm": {"policy_loss_type": name}}}
    finally:
        PolicyLossRegistry.unregister(name)


def test_breakpoints_in_reward_and_loss_stop_in_driver_process(
    settings: Any, merged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[str, Any]] = []

    def hook() -> None:
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_name, frame.f_locals.get("reward", frame.f_locals.get("loss"))))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    with register_environments(stops=Stops), policy_loss("stops", loss_that_stops) as changes:
        one_step = {"environment": {"env_class": "stops"}, "trainer": {"max_training_steps": 1}}
        BasePPOExp(settings(tmp_path, merged(changes, one_step))).run()
    names = [name for name, _ in seen]
    assert names == ["reward"] * 16 + ["loss_that_stops"] * 4, "4 x 4 answers; two optimizer steps of two micro-batches"
    assert all(0 < reward <= 1 for name, reward in seen if name == "reward")
    assert all(loss.requires_grad for name, loss in seen if name == "loss_that_stops")


def test_custom_loss_error_names_worker_and_line(settings: Any, tmp_path: Path):
    with policy_loss("fails", loss_that_fails) as changes, pytest.raises(WorkerError) as error:
        BasePPOExp(settings(tmp_path, changes)).run()
    place = re.escape(str(Path(__file__))) + r":\d+ in loss_that_fails: raise KeyError"
    assert re.match(rf"policy worker 0 raised KeyError: 'my bug'\n{place}", str(error.value))


def test_call_timeout_ends_run(settings: Any, merged: Any, tmp_path: Path):
    at_once = {"trainer": {"worker_timeout_seconds": 1e-4}}
    with pytest.raises(WorkerError, match=r"trainer\.worker_timeout_sec"):
        BasePPOExp(settings(tmp_path, merged(INLINE, at_once))).run()


@pytest.mark.slow
def test_resumed_inline_run_equals_uninterrupted_run(settings: Any, merged: Any, chat_model: str, tmp_path: Path):
    models = merged(merged(MODELS, INLINE), {"trainer": {"critic": {"model": {"path": chat_model}}}})
    changes = merged(models, {"trainer": {"ckpt_interval": 1, "hf_save_interval": 3}})

    def run(folder: str, num_steps: int) -> Any:
        cfg = settings(tmp_path / folder, merged(changes, {"trainer": {"max_training_steps": num_steps}}))
        BasePPOExp(cfg).run()
        return result_of(cfg)

    expected, weights = run("whole", 3)
    run("stopped", 1)
    torch.manual_seed(7)  # another process begins with other random numbers
    steps, own_weights = run("stopped", 3)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps == expected
    assert all(step["generate/weight_version_lag_max"] == 0 for step in steps), (
        "trained on by the weights that wrote it"
    )
    assert all(torch.equal(own_weights[f"{name}"], tensor) for name, tensor in weights.items())


@pytest.mark.slow
def test_run_leaves_no_process_group_in_model_thread(settings: Any, tmp_path: Path):
    """A child forked with `preexec_fn` (as by Ray) ends what belongs to other threads, and hung in ending the group
    that torch's plans of sharded tensors held."""
    BasePPOExp(settings(tmp_path, INLINE)).run()
    assert model_thread().submit(torch._C._get_DTensor_sharding_propagator_cache_stats).result() == (0, 0)
