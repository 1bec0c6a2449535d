"""Utilization of a GPU and memory of its machine, sampled in the background."""

import shutil
import subprocess
import threading
from pathlib import Path

INTERVAL_SECONDS = 5.0
_TIMEOUT_SECONDS = 30.0
_QUERY = "--query-gpu=utilization.gpu,memory.used"
_MEMINFO = Path("/proc/meminfo")


class GpuMonitor:
    """Thread that queries nvidia-smi for one GPU every few seconds.

    Args:
        uuid: UUID of the GPU.
        program: nvidia-smi.
    """

    def __init__(self, uuid: str, program: str = "nvidia-smi", interval_seconds: float = INTERVAL_SECONDS):
        self._command = [program, "-i", uuid, _QUERY, "--format=csv,noheader,nounits"]
        self._interval_seconds = interval_seconds
        self._samples: list[dict[str, float]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def start(self) -> None:
        """Start sampling."""
        threading.Thread(target=self._run, name="gpu-monitor", daemon=True).start()

    def sample(self) -> bool:
        """Add one sample. Returns: False if nvidia-smi fails."""
        try:
            done = subprocess.run(self._command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
            utilization, mebibytes = (float(value) for value in done.stdout.split(","))
        except (OSError, ValueError, subprocess.SubprocessError):
            return False
        found = {"gpu_utilization_percent": utilization, "gpu_memory_gb": mebibytes * 2**20 / 1e9}
        with self._lock:
            self._samples.append(found | measure_host_memory())
        return True

    def get_means(self) -> dict[str, float]:
        """Return the mean of the samples since the last call. Empty without samples."""
        with self._lock:
            samples, self._samples = self._samples, []
        return {name: sum(sample[name] for sample in samples) / len(samples) for name in (samples or [{}])[0]}

    def close(self) -> None:
        """End the thread after its current sample."""
        self._ended.set()

    def _run(self) -> None:
        while self.sample() and not self._ended.wait(self._interval_seconds):
            pass


def measure_host_memory() -> dict[str, float]:
    """Return the used memory of this machine. Empty if the kernel does not report it."""
    try:
        values = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        kibibytes = [int(values[name].split()[0]) for name in ("MemTotal", "MemAvailable")]
    except (OSError, KeyError, ValueError):
        return {}
    return {"host_memory_gb": (kibibytes[0] - kibibytes[1]) * 1024 / 1e9}


def start_monitor(uuid: str | None) -> GpuMonitor | None:
    """Return a monitor that samples the GPU; None on a CPU or without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if uuid is None or program is None:
        return None
    monitor = GpuMonitor(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", program)
    monitor.start()
    return monitor


def load_metrics(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return metrics of the loads of all ranks: `gpu/<name>` of each, with mean and maximum over ranks."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for load in ranks for name in load):
        values = {rank: load[name] for rank, load in enumerate(ranks) if name in load}
        metrics |= {f"gpu/rank_{rank}/{name}": value for rank, value in values.items()}
        metrics[f"gpu/mean_{name}"] = sum(values.values()) / len(values)
        metrics[f"gpu/max_{name}"] = max(values.values())
    return metrics
