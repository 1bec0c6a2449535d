"""Profile of a rank over training steps (`trainer.policy.torch_profiler_config`)."""

import warnings
from pathlib import Path

import torch
from loguru import logger
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.models import TorchProfilerConfig
from skyrl_train.utils.io import expand_path

_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}


class StepProfiler:
    """Recorder of one rank's training steps. Runs in the thread that created it.

    Args:
        folder: folder of the files, `rank_<rank>_step_<step>.json.gz` or `.stacks`, named after the last step in them.
    """

    def __init__(self, settings: TorchProfilerConfig, folder: Path, rank: int, device: torch.device):
        self._settings = settings
        self._folder = folder
        self._rank = rank
        self._step = 0
        self._on_device = device.type == "cuda" and "cuda" in settings.activities
        names = [name for name in settings.activities if name != "cuda" or self._on_device]
        self._profile = profile(
            activities=[_ACTIVITIES[name] for name in names],
            schedule=schedule(
                skip_first=settings.skip_first,
                wait=settings.wait,
                warmup=settings.warmup,
                active=settings.active,
                repeat=settings.repeat,
            ),
            on_trace_ready=self._write,
            record_shapes=settings.record_shapes,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
            with_flops=settings.with_flops,
            with_modules=settings.with_modules,
            # Without `verbose` the stacks to export are empty.
            experimental_config=_ExperimentalConfig(verbose=settings.export_type == "stacks"),
        )
        # One file per cycle.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events at the end of each cycle")
        self._profile.start()

    def end_step(self, step: int) -> None:
        """End a step of the schedule. Writes a file after the last step of a cycle.

        Args:
            step: number of the training step.
        """
        self._step = step
        self._profile.step()

    def close(self) -> None:
        """End the profile and write an unfinished cycle."""
        self._profile.stop()

    def _write(self, ended: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{self._rank}_step_{self._step:06d}"
        if self._settings.export_type == "stacks":
            metric = "self_cuda_time_total" if self._on_device else "self_cpu_time_total"
            path = path.with_suffix(".stacks")
            ended.export_stacks(str(path), metric)
        else:
            path = path.with_suffix(".json.gz")
            ended.export_chrome_trace(str(path))
        logger.info(f"profile of rank {self._rank}: {path}")


def create_profiler(cfg: SkyRLConfig, rank: int, device: torch.device) -> StepProfiler | None:
    """Create and start the profiler of a policy rank; None if the rank is not profiled."""
    settings = cfg.trainer.policy.torch_profiler_config
    if not settings.enable or rank not in settings.ranks:
        return None
    folder = expand_path(settings.save_path or cfg.trainer.run_dir)
    return StepProfiler(settings, folder if settings.save_path else folder / "profiles", rank, device)
