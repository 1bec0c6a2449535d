"""Rows for `data` and `trainer`, without `trainer.algorithm`."""

import asyncio
import gzip
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from effects import (
    Bench,
    Experiment,
    OneChoice,
    Row,
    Run,
    See,
    Settings,
    error,
    files,
    log,
    model,
    of_run,
    refusal,
    start_error,
    trajectories,
    weights,
)
from torch import nn

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.entrypoints import main_base
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.utils.progress import progress
from skyrl_train.utils.run_folder import RunFolder, link_logs
from skyrl_train.utils.tracking import Tracking
from skyrl_train.workers import policy_worker as policy_worker_module
from skyrl_train.workers import worker as worker_module
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train.workers.profiler import create_profiler
from skyrl_train.workers.worker import CriticWorker, RefWorker
from skyrl_train_testing.rank_processes import ForkedRanks

KL = {"trainer.algorithm.use_kl_loss": True, "trainer.algorithm.kl_loss_coef": 0.5}
CRITIC = {"trainer.critic.model.path": "{model}", "trainer.algorithm.advantage_estimator": "gae"}
THREE_STEPS = {"trainer.max_training_steps": 3}
EVALUATION = {"data.val_data": ["{folder}/prompts.jsonl"], "trainer.eval_interval": 2}
FROM_PATH = {"trainer.resume_mode": "from_path", "trainer.resume_path": "{ckpts}/global_step_2"}
CHECKPOINTS = THREE_STEPS | {"trainer.ckpt_interval": 1}
TWO_MINI_BATCHES = {"trainer.train_batch_size": 4}
ASYNC = TWO_MINI_BATCHES | {
    "trainer.placement.colocate_all": False,
    "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
    "trainer.fully_async.enabled": True,
}
FILTERED = {"environment.env_class": "sometimes_toy", "trainer.algorithm.zero_variance_filter": True}
UNDER_RAY = {"trainer.placement.launcher": "ray"}


def micro_batches(method: str) -> Any:
    """The rows of every micro-batch that workers were given."""
    return of_run(lambda run: [args[-1] for name, args in run.record.calls if name == method])


def quiet(see: See) -> See:
    """Suppress the warning that a setting is unwise."""

    def seen(bench: Bench, settings: Settings) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return see(bench, settings)

    return seen


def num_processes(bench: Bench, settings: Settings) -> Any:
    """Number and device of the processes that each group of workers asks Ray for."""
    return bench.run({**settings, **UNDER_RAY}, steps=False).record.groups


def shards(name: str) -> See:
    """Data-parallel ranks of a model on two ranks, which are started."""

    def seen(bench: Bench, settings: Settings) -> Any:
        config = bench.config(settings)
        kind, args = {
            "policy": (PolicyWorker, (config, PolicyLossRegistry.get("regular"), 1)),
            "critic": (CriticWorker, (config, 1)),
            "ref": (RefWorker, (config,)),
        }[name]
        ranks = ForkedRanks(name, kind, args, num_ranks=2, log_folder=bench.folder)
        group = ActorGroup(name, ranks, device="cpu", timeout_seconds=120)
        try:
            asyncio.run(group.init_model())
            return group.data_parallel_size
        finally:
            group.kill()

    return seen


def built(name: str, see: Callable[[Any], Any]) -> See:
    """A property of a model as a worker builds it, without a run (which may refuse it, or take long)."""

    def seen(bench: Bench, settings: Settings) -> Any:
        config = bench.config(settings)
        worker: Any = CriticWorker(config, 1)
        if name == "policy":
            worker = PolicyWorker(config, PolicyLossRegistry.get("regular"), 1)
        return see(worker.backend.build(worker.backend.settings.model.path, with_weights=True))

    return seen


def dropout(module: nn.Module) -> set[float]:
    """(A run refuses it in adapters; supervised training does not.)"""
    return {m.p for m in module.modules() if isinstance(m, nn.Dropout)}


def moved_bytes(name: str) -> See:
    """Measure what leaves the device, as on a GPU, after one optimizer step."""

    def seen(bench: Bench, settings: Settings) -> Any:
        worker = bench.run(settings).worker(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(worker.backend), "frees_device", True)
            moved = worker.offload_to_cpu()
            worker.backload_to_gpu()
        return moved.num_bytes

    return seen


def pauses(run: Run) -> list[Any]:
    """Modes in which engines were paused."""
    return [args for name, args in run.record.calls if name == "pause_generation"]


def _limits(run: Run) -> Any:
    assert run.experiment is not None and isinstance(run.experiment.trainer, FullyAsyncRayPPOTrainer)
    assert run.experiment.trainer.pool is not None
    return run.experiment.trainer.pool.scheduler.limits


schedule = of_run(_limits)
"""The limits that the scheduler of a run was given (`tests/rollouts` shows the effect of each)."""


class Diverged(PolicyWorker):
    """Policy worker whose gradients are not finite."""

    def optim_step(self) -> dict[str, float]:
        for weight in self.backend.model.parameters():
            if weight.grad is not None:
                weight.grad.mul_(float("nan"))
        return super().optim_step()


def end_of_diverged_run(bench: Bench, settings: Settings) -> Any:
    return bench.run({**settings, "trainer.update_epochs_per_batch": 3}, policy_worker=Diverged).error[:60]


def tracker(bench: Bench, settings: Settings) -> Any:
    """Return the calls of a tracking service; a stand-in for its package."""
    told: list[Any] = []
    package = ModuleType("swanlab")
    vars(package)["config"] = {}
    vars(package)["init"] = lambda **given: told.append((given["project"], given["name"], given.get("tags")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "swanlab", package)
        Experiment(bench.config(settings, bench.folder / "tracked")).get_tracker()
    return told


def samples(bench: Bench, settings: Settings) -> Any:
    """Return the tables of samples that a run sends to its tracker."""
    sent: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracking, "log_samples", lambda _, name, rows, step: sent.append((name, len(rows), step)))
        bench.forget()
        with warnings.catch_warnings(action="ignore"):
            bench.run(settings)
    return sent


def log_folder(bench: Bench, settings: Settings) -> Any:
    """Return where a run's folder of logs is."""
    config = bench.config(settings, Path(tempfile.mkdtemp(dir=bench.folder)) / "run")
    folder = config.trainer.log_folder
    if folder is not None:
        link_logs(RunFolder(config.trainer.run_dir), folder)
    return RunFolder(config.trainer.run_dir).logs_folder.resolve().relative_to(bench.folder.resolve()).parts[1:]


def on_cuda(bench: Bench, settings: Settings) -> Any:
    """Return what a worker does besides where its device is a GPU; it is not, so the start fails there."""
    config = bench.config(settings)
    done: list[str] = []
    worker: Any = PolicyWorker(config, PolicyLossRegistry.get("regular"), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "enable_expandable_segments", lambda: done.append("expandable"))
        patch.setattr(policy_worker_module, "start_monitor", lambda uuid: done.append("monitor"))
        patch.setattr(worker.backend, "join", lambda info: None)
        patch.setattr(worker.backend, "load_model", lambda: None)
        patch.setattr(type(worker.backend), "shares_prefixes", True)
        worker.init_model(RankInfo(rank=0, world_size=1, device="cuda:0"))
    return done


def profiled(bench: Bench, settings: Settings) -> Any:
    """Return the names of the files of a profile and what they record."""
    run = bench.run(settings)
    assert not run.error, run.error
    found = {}
    for path in sorted(run.folder.rglob("rank_*_step_*")):
        text = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
        marks = (b"Input Dims", b"[memory]", b"python_function", b"flops", b"aten::mm", b"Module Hierarchy")
        found[str(path.relative_to(run.folder))] = [mark in text for mark in marks]
    return found


def with_modules(bench: Bench, settings: Settings) -> Any:
    """Return whether the modules of TorchScript, of which there are none in a run, would be recorded."""
    profiler = create_profiler(bench.config(settings, bench.folder / "profiled"), 0, torch.device("cpu"))
    assert profiler is not None
    profiler.close()
    return profiler._profile.with_modules


def resumed(bench: Bench, settings: Settings) -> Any:
    """The steps of a run that finds the checkpoints of another one of two steps."""
    first = bench.run({"trainer.max_training_steps": 2, "trainer.ckpt_interval": 1})
    place = Path(tempfile.mkdtemp(dir=bench.folder)) / "ckpts"
    shutil.copytree(first.folder / "run" / "ckpts", place)
    own = {"trainer.max_training_steps": 3, "trainer.ckpt_path": str(place), **settings}
    own = {
        name: value.replace("{ckpts}", str(place)) if isinstance(value, str) else value for name, value in own.items()
    }
    run = bench.run(own)
    return [row["step"] for row in run.metrics], run.error[:30]


def checkpoints_of_stopped_run(bench: Bench, settings: Settings) -> Any:
    """The checkpoints of a run that gets SIGTERM in its first update."""
    place = Path(tempfile.mkdtemp(dir=bench.folder))
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)

    class Stopped(PolicyWorker):
        def forward_backward(self, *args: Any, **keywords: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().forward_backward(*args, **keywords)

    try:
        with suppress(KeyboardInterrupt):
            bench.run({**THREE_STEPS, **settings, "trainer.ckpt_path": str(place)}, policy_worker=Stopped)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return [path.name for path in place.iterdir()]


def shows_progress(bench: Bench, settings: Settings) -> Any:
    """Whether progress is shown while an experiment is made."""
    found: list[bool] = []

    class FinishedExperiment:
        def __init__(self, cfg: Any):
            found.append(progress.is_on)

        def is_finished(self) -> bool:
            return True

        def run(self) -> None:
            raise AssertionError("it is finished")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("configure_logging", "shutdown_ray"):  # the log and Ray are those of the other tests, too
            patch.setattr(main_base, name, lambda *_: None)
        main_base.run_experiment(bench.config(settings, bench.folder / "shown"), FinishedExperiment)
    return found


def prompts(run: Run) -> Any:
    return [row["prompt"] for row in run.trajectories]


def called(run: Run) -> list[str]:
    """Methods of workers and engines, in order."""
    return [name for name, _ in run.record.calls]


num_steps = of_run(lambda run: len(run.metrics))
checkpoint_calls = of_run(lambda run: [name for name in called(run) if name.endswith("_checkpoint")])
"""Calls of workers that save."""


def transformer(see: Callable[[Any], Any]) -> See:
    return model(lambda worker: see(worker.backend.transformer))


def fsdp(worker: Any) -> Any:
    group = worker.backend.model._get_fsdp_state()._fsdp_param_group
    return type(group.offload_policy).__name__, group.post_forward_mesh_info is None


def attention(worker: Any) -> Any:
    return worker.backend.transformer.config._attn_implementation, worker.backend.model.packing


def evaluated(run: Run) -> Any:
    return [asked["prompts"] for asked in run.asked if asked["batch_metadata"].training_phase == "eval"]


def evaluations(run: Run) -> Any:
    return [len(asked["prompts"]) for asked in run.asked if asked["batch_metadata"].training_phase == "eval"]


ROWS: list[Row | OneChoice] = [
    Row("data.train_data", ["{folder}/other_prompts.jsonl"], trajectories),
    Row("data.val_data", ["{folder}/other_prompts.jsonl"], of_run(evaluated), EVALUATION),
    Row("data.cache_dir", "{run}/rows", files),
    OneChoice("trainer.strategy", "fsdp3"),
    OneChoice("trainer.sequence_parallel_backend", "ring"),
    Row("trainer.seed", 7, of_run(prompts), {"generator.seed": 0}),
    Row("trainer.epochs", 2, num_steps, {"trainer.max_training_steps": None, "trainer.train_batch_size": 8}),
    Row("trainer.max_training_steps", 2, num_steps),
    Row("trainer.train_batch_size", 4, of_run(lambda run: len(prompts(run)))),
    Row("trainer.policy_mini_batch_size", 4, weights(), TWO_MINI_BATCHES),
    Row("trainer.critic_mini_batch_size", 4, weights("critic"), TWO_MINI_BATCHES | CRITIC),
    Row("trainer.update_epochs_per_batch", 2, weights()),
    Row("trainer.micro_train_batch_size_per_gpu", 1, micro_batches("forward_backward")),
    Row("trainer.micro_forward_batch_size_per_gpu", 1, micro_batches("forward"), KL),
    Row("trainer.max_tokens_per_microbatch", 48, micro_batches("forward_backward")),
    Row("trainer.use_sample_packing", False, model(attention)),
    Row("trainer.use_shared_prefixes", False, model(lambda worker: worker.backend.model.share_prefixes)),
    Row("trainer.logprobs_chunk_size", 8, model(lambda worker: worker.backend.model.chunk_size)),
    Row(
        "trainer.update_ref_every_epoch",
        True,
        weights("ref"),
        KL | {"trainer.max_training_steps": 2, "trainer.epochs": 2, "trainer.train_batch_size": 8},
    ),
    Row("trainer.max_prompt_length", 30, of_run(lambda run: len(run.experiment.train_dataset))),
    Row("trainer.eval_batch_size", 3, of_run(evaluations), EVALUATION),
    Row("trainer.eval_before_train", False, of_run(evaluations), EVALUATION),
    Row("trainer.eval_interval", 1, of_run(evaluations), EVALUATION | THREE_STEPS),
    Row("trainer.bf16", True, weights()),
    Row("trainer.flash_attn", False, model(attention)),
    Row("trainer.gradient_checkpointing", True, transformer(lambda model: model.is_gradient_checkpointing)),
    Row(
        "trainer.gradient_checkpointing_use_reentrant",
        True,
        quiet(transformer(lambda model: model.get_decoder().layers[0]._gradient_checkpointing_func.keywords)),
        {"trainer.gradient_checkpointing": True},
    ),
    Row(
        "trainer.compile_layers",
        True,
        quiet(transformer(lambda model: "forward" in vars(model.get_decoder().layers[0]))),
    ),
    Row("trainer.run_dir", "{run}/../elsewhere", files),
    Row(
        "trainer.print_example_interval",
        2,
        of_run(lambda run: sum("response" in line for line in run.log)),
        THREE_STEPS | {"trainer.print_example_interval": 1},
    ),
    Row("trainer.show_progress", False, shows_progress),
    Row("trainer.hooks", [], log),
    Row("trainer.curve_bands", "{folder}/no_bands.yaml", start_error),
    Row("trainer.on_diagnostic", "stop", error, {"trainer.max_training_steps": 6, "trainer.epochs": 5}),
    Row("trainer.ckpt_path", "{run}/../elsewhere", files, CHECKPOINTS),
    Row("trainer.ckpt_interval", 2, files, CHECKPOINTS),
    Row("trainer.ckpt_async", True, checkpoint_calls, CHECKPOINTS),
    Row("trainer.max_ckpts_to_keep", 1, files, CHECKPOINTS),
    Row("trainer.export_path", "{run}/../elsewhere", files, {"trainer.hf_save_interval": 1}),
    Row("trainer.hf_save_interval", 1, files),
    Row("trainer.dump_data_batch", True, files),
    Row("trainer.dump_eval_results", False, files, EVALUATION),
    Row("trainer.dump_trajectories", False, files),
    Row("trainer.dump_token_columns", False, files),
    Row("trainer.compress_trajectories", True, files),
    Row("trainer.max_trajectories_gb", 1e-9, files, THREE_STEPS),
    Row("trainer.worker_timeout_seconds", 1e-4, error),
    Row("trainer.stop_timeout_seconds", 0, checkpoints_of_stopped_run, {"trainer.ckpt_interval": 10}),
    Row("trainer.placement.launcher", "ray", of_run(lambda run: run.record.launchers)),
    Row("trainer.placement.device", "cuda", num_processes, {"trainer.placement.colocate_all": False}),
    Row("trainer.placement.colocate_all", False, of_run(called)),
    Row("trainer.placement.offload", "keep", of_run(called)),
    Row("trainer.placement.colocate_policy_ref", False, of_run(called), KL | {"trainer.placement.colocate_all": False}),
    Row(
        "trainer.policy.routing_replay",
        "R2",
        weights(),
        {"trainer.policy.model.path": "{mixture}", "trainer.update_epochs_per_batch": 4}
        | {"trainer.policy.optimizer_config.lr": 3e-2, "generator.sampling_params.max_generate_length": 24},
    ),
    Row(
        "trainer.policy.sampling_mask_replay",
        True,
        of_run(lambda run: [row["policy/policy_entropy"] for row in run.metrics]),
        {"generator.sampling_params.top_k": 5},
    ),
    Row("trainer.policy.use_torch_compile", True, built("policy", lambda module: module.compile_scores)),
]
ROWS += [
    Row("trainer.disable_fast_tokenizer", True, error),  # no tokenizer of transformers 5 that is at hand has two forms
    Row("trainer.logger", "swanlab", tracker),
    Row("trainer.project_name", "mine", tracker, {"trainer.logger": "swanlab"}),
    Row("trainer.run_name", "mine", tracker, {"trainer.logger": "swanlab"}),
    Row("trainer.tags", ["mine"], tracker, {"trainer.logger": "swanlab"}),
    Row("trainer.num_logger_train_samples", 2, samples),
    Row("trainer.num_logger_eval_samples", 2, samples, EVALUATION),
    Row("trainer.log_path", "{run}/../elsewhere", log_folder),
    Row("trainer.use_expandable_segments", True, on_cuda),
    Row("trainer.enable_ray_gpu_monitor", False, on_cuda),
    Row("trainer.resume_mode", "none", resumed),
    Row("trainer.max_consecutive_skipped_updates", 2, quiet(end_of_diverged_run)),
    Row("trainer.resume_allow_changes", True, resumed, {"environment.env_class": "sometimes_toy"}),
    Row("trainer.resume_path", "{ckpts}/global_step_1", resumed, FROM_PATH),
]
ROWS += [
    Row(
        "trainer.fully_async.enabled",
        True,
        of_run(lambda run: [name for name in run.metrics[0] if name.startswith("async/")]),
        ASYNC | {"trainer.fully_async.enabled": False},
    ),
    Row("trainer.fully_async.max_staleness_steps", 1, schedule, ASYNC),
    Row("trainer.fully_async.num_parallel_generation_workers", 7, schedule, ASYNC),
    Row("trainer.fully_async.order", "oldest", schedule, ASYNC),
    Row("trainer.fully_async.on_stale", "drop", schedule, ASYNC),
    Row(
        "trainer.fully_async.sample_full_batch",
        True,
        of_run(lambda run: run.metrics[0]["async/num_filtered_groups"] > 0),
        ASYNC | FILTERED | {"trainer.fully_async.order": "exact"},
    ),
    Row(
        "trainer.fully_async.sync_every_steps",
        3,
        of_run(lambda run: called(run).count("pause_generation")),
        ASYNC | THREE_STEPS,
    ),
    Row("trainer.fully_async.pause", "wait", of_run(pauses), ASYNC),
    Row("trainer.fully_async.kv_after_sync", "recompute", of_run(pauses), ASYNC),
    Row(
        "trainer.fully_async.clear_kv_cache_on_weight_sync",
        True,
        quiet(of_run(lambda run: called(run).count("reset_prefix_cache"))),
        ASYNC,
    ),
    Row("trainer.fully_async.group_timeout_seconds", 1e-6, error, ASYNC),
]
PROFILER = "trainer.policy.torch_profiler_config"
PROFILE = {f"{PROFILER}.enable": True, f"{PROFILER}.skip_first": 0, f"{PROFILER}.with_stack": False}
PROFILE |= {"trainer.max_training_steps": 4}
ROWS += [
    Row(f"{PROFILER}.enable", False, profiled, PROFILE),
    Row(f"{PROFILER}.ranks", [1], error, PROFILE),
    Row(f"{PROFILER}.save_path", "{run}/../elsewhere", profiled, PROFILE),
    Row(f"{PROFILER}.skip_first", 1, profiled, PROFILE),
    Row(f"{PROFILER}.wait", 1, profiled, PROFILE),
    Row(f"{PROFILER}.warmup", 2, profiled, PROFILE),
    Row(f"{PROFILER}.active", 2, profiled, PROFILE),
    Row(f"{PROFILER}.repeat", 2, profiled, PROFILE),
    Row(f"{PROFILER}.activities", ["cuda"], refusal, PROFILE),
    Row(f"{PROFILER}.record_shapes", False, profiled, PROFILE),
    Row(f"{PROFILER}.profile_memory", True, profiled, PROFILE),
    Row(f"{PROFILER}.with_stack", True, profiled, PROFILE),
    Row(f"{PROFILER}.with_flops", True, profiled, PROFILE),
    Row(f"{PROFILER}.with_modules", True, with_modules, PROFILE),
    Row(f"{PROFILER}.export_type", "stacks", profiled, PROFILE | {f"{PROFILER}.with_stack": True}),
]
for name, needs in {"policy": {}, "critic": CRITIC, "ref": KL}.items():
    section = f"trainer.{name}"
    trained = name != "ref"
    sizes = ("num_nodes", "num_gpus_per_node")
    ROWS += [Row(f"trainer.placement.{name}_{size}", 2, num_processes, needs) for size in sizes]
    ROWS += [
        Row(f"{section}.model.path", "{other_model}", weights(name), needs),
        Row(
            f"{section}.model_config_kwargs",
            {"rms_norm_eps": 0.1},
            weights("policy" if name == "ref" else name),
            needs | {"trainer.update_epochs_per_batch": 2},
        ),
        Row(f"{section}.fsdp_config.cpu_offload", True, model(fsdp, name), needs),
        Row(f"{section}.fsdp_config.reshard_after_forward", False, model(fsdp, name), needs),
        Row(f"{section}.fsdp_config.fsdp_size", 2, start_error, needs),
        Row(
            f"{section}.sequence_parallel_size",
            2,
            shards(name),
            needs | {f"trainer.placement.{name}_num_gpus_per_node": 2},
        ),
    ]
    if trained:
        lora, optimizer = f"{section}.model.lora", f"{section}.optimizer_config"
        adapters = needs | {f"{lora}.rank": 4}
        steps = needs | THREE_STEPS
        ROWS += [
            Row(f"{lora}.rank", 4, weights(name), needs),
            Row(f"{lora}.dropout", 0.5, built(name, dropout), adapters),
            Row(f"{lora}.alpha", 64, weights(name), adapters),
            Row(f"{lora}.target_modules", ["q_proj"], weights(name), adapters),
            Row(f"{lora}.exclude_modules", ["q_proj"], weights(name), adapters),
            Row(f"{lora}.init_method", "gaussian", weights(name), adapters),
            Row(f"{optimizer}.offload_after_step", False, moved_bytes(name), needs),
            Row(f"{optimizer}.lr", 1e-3, weights(name), needs),
            Row(f"{optimizer}.adam_betas", [0.5, 0.6], weights(name), steps),
            Row(f"{optimizer}.weight_decay", 0.5, weights(name), needs),
            Row(f"{optimizer}.max_grad_norm", 0.01, weights(name), steps),
            Row(f"{optimizer}.num_warmup_steps", 2, weights(name), needs),
            Row(f"{optimizer}.scheduler", "linear", weights(name), steps),
        ]
