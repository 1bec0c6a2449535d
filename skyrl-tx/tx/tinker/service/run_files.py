"""Run folders of models and of the server, in the trainer's format, which the dashboard reads.

The database removes results after delivery, so the training history is written here as it happens: a model
has `config.yaml`, `metrics.jsonl` with a line an optimizer step, and `logs/trainer.log`; the folder `server` has a line
a minute. Prompts and responses are included only if enabled (`kept_samples`). Nothing depends on these
files: a line that cannot be written, or is lost in a crash, leaves a gap in a curve. Any of the folders may be deleted;
    `limit` deletes the oldest ones.
"""

import json
import logging
import os
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

from tx.tinker.commands import Sample
from tx.tinker.config import EngineConfig
from tx.tinker.service.kept_samples import KeptSamples
from tx.tinker.service.run_folders import remove_oldest
from tx.tinker.service.state import PendingRequest, Run
from tx.tinker.types import SERVER, PassOutput, TinkerPath
from tx.tinker.wire.codec import decode_sample_output
from tx.tinker.wire.merging import merge_outputs

log = logging.getLogger(__name__)

LOG_BYTES, NUM_OLD_LOGS = 16 << 20, 3
"""Size of the server's log at which a new file begins, and the number of earlier ones that stay."""

MODEL_LOG_BYTES = 4 << 20
"""Size of a model's `trainer.log` at which a new one begins; the one before stays as `trainer.log.1`."""

MOST_WAITING = 100_000
"""Lines that wait for a stalled disk; further ones are lost."""
MOST_WAITING_SAMPLES, MOST_SAMPLE_BYTES = 1000, 64 << 20
"""Lines that wait, and results of samples among them, at which further samples are not kept: they would fill the
memory."""

_TAIL_BYTES = 64 << 10
_MAX_ERROR = 500


@dataclass
class _Progress:
    """Numbers of a model since its last optimizer step."""

    step: int
    began: float
    output: PassOutput | None = None
    weight: float = 0.0
    """Targets of `output`."""
    samples: Counter[str] = field(default_factory=Counter)
    tenant: str | None = None
    """Owner of the model, once it was read."""

    def add(self, metrics: dict[str, float]) -> None:
        """Merge the metrics of a forward-backward pass."""
        new, weight = PassOutput(logprobs=[], metrics=metrics), max(metrics.get("targets:sum", 1.0), 1.0)
        self.output = new if self.output is None else merge_outputs([self.output, new], [self.weight, weight])
        self.weight += weight

    def build_row(self, optimizer: dict[str, float]) -> dict[str, float]:
        """Return the row of the optimizer step that ends here."""
        metrics = {} if self.output is None else self.output.metrics
        row = {"step": self.step + 1, "time": time.time(), "timing/step": time.monotonic() - self.began}
        if "loss:sum" in metrics:  # clients sum over targets; a mean can be compared
            row["train/loss"] = metrics["loss:sum"] / max(metrics.get("targets:sum", 1.0), 1.0)
        row |= {f"train/{name}": value for name, value in metrics.items()}
        row |= {f"optimizer/{name}": value for name, value in optimizer.items()}
        row |= {f"sampler/{name}": float(value) for name, value in self.samples.items()}
        return row


class RunFiles:
    """Writer of the run folders. A single thread writes, so that lines keep their order and a slow disk does not block
    the event loop.

    Args:
        folder: `runs` in the state folder.
        samples: store for samples; None: samples are not stored.
    """

    def __init__(self, folder: Path, samples: KeptSamples | None = None):
        self._folder, self._samples = folder, samples
        # Not a pool: the interpreter joins pool threads at exit, however long the disk is stalled.
        self._thread = threading.Thread(target=self._write_all, name="run-files", daemon=True)
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._progress: dict[str, _Progress] = {}  # of live models; only that thread uses it
        self._sample_bytes, self._lock = 0, threading.Lock()  # of samples that wait; used by both threads
        self._done: Counter[str] = Counter()
        self._is_failing = self._is_full = self._is_closed = False
        self._not_removed: set[str] = set()

    def begin(self, config: EngineConfig) -> None:
        """Log the start of the server with its settings, except the database's URL, which may contain a password."""
        settings = config.model_dump(mode="json", exclude={"database_url"})
        facts = {"trainer": {"run_name": SERVER, "policy": {"model": {"path": config.base_model}}}, "tinker": settings}
        self._submit(partial(self._write_start, SERVER, facts, "step 0: the server starts"))

    def done(
        self, pending: PendingRequest, metrics: dict[str, float], model_id: str | None = None, body: bytes = b""
    ) -> None:
        """Write a request that succeeded.

        Args:
            metrics: numbers of the engine.
            body: the stored result.
            model_id: for a sample, the model of the sampled weights, if known.
        """
        self._done[pending.kind] += 1
        run = pending.run
        if run is not None and pending.kind == "create":
            self._submit(partial(self._create, run))
        elif run is not None and pending.kind == "train":
            self._submit(lambda: self._get_progress(run.model_id).add(metrics))
        elif run is not None and pending.kind == "optimize":
            self._submit(partial(self._step, run.model_id, metrics))
        elif run is not None and pending.kind == "unload":
            self._submit(partial(self._write_end, run.model_id))
        elif run is not None and pending.kind in ("save", "load"):
            self._submit(partial(self._log, run.model_id, "INFO", _format_checkpoint_event(pending, run)))
        elif model_id is not None:  # a sample
            counts = {"requests": 1, "tokens": int(metrics.get("tokens", 0))}
            self._submit(lambda: self._get_progress(model_id).samples.update(counts))
            if self._samples is not None and self._has_room_for(body):
                self._submit(partial(self._save_sample, self._samples, model_id, pending, body))

    def failed(self, pending: PendingRequest, error: str, category: str) -> None:
        """Write a request that failed."""
        self._done[f"{pending.kind}_failed"] += 1
        if (run := pending.run) is not None:
            level = "ERROR" if pending.kind == "create" else "WARNING"
            text = f"{pending.kind} {pending.request_id} failed ({category}): {error}"
            self._submit(partial(self._log, run.model_id, level, text))

    def note(self, numbers: Mapping[str, float | Mapping[str, float]]) -> None:
        """Write the current metrics of the server, summed over tenants."""
        sums = {name: sum(value.values()) if isinstance(value, Mapping) else value for name, value in numbers.items()}
        row = {f"server/{name}": float(value) for name, value in sums.items()}
        row |= {f"requests/{kind}": float(count) for kind, count in self._done.items()}
        self._submit(partial(self._write_numbers, row))

    def limit(self, max_bytes: float, live: Iterable[str]) -> None:
        """Remove the oldest run folders beyond a total size, except the server's and those that belong to live
        models.
        """
        self._submit(partial(self._remove_oldest, max_bytes, {self._get_path(name).name for name in (SERVER, *live)}))

    def close(self, seconds: float | None = None) -> None:
        """Write that the server stops, and wait until all is written, but not longer than `seconds`."""
        self._submit(partial(self._log, SERVER, "INFO", "stop requested"))
        self._is_closed = True
        self._writes.put(None)
        self._thread.join(seconds)

    def _has_room_for(self, body: bytes) -> bool:
        """Return whether a sample may wait, and count its bytes if so. `_save_sample` counts them off."""
        with self._lock:
            if self._writes.qsize() >= MOST_WAITING_SAMPLES or self._sample_bytes + len(body) > MOST_SAMPLE_BYTES:
                return False
            self._sample_bytes += len(body)
            return True

    def _submit(self, write: Callable[[], None]) -> None:
        if self._is_closed:  # a request may end after the server's stop
            return
        if self._thread.ident is None:
            self._thread.start()
        if self._writes.qsize() < MOST_WAITING:
            self._writes.put(write)

    # ---- in the thread

    def _write_all(self) -> None:
        while (write := self._writes.get()) is not None:
            try:
                write()
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    log.warning("run folders in %s cannot be written, so metrics have gaps: %s", self._folder, error)
                self._is_failing = True
            except Exception:  # a curve is no reason to end anything
                log.exception("run folders in %s", self._folder)

    def _get_path(self, name: str) -> Path:
        return self._folder / re.sub(r"[^A-Za-z0-9._-]", "_", name)

    def _write_start(self, name: str, facts: dict, text: str) -> None:
        path = self._get_path(name)
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(json.dumps(facts, indent=2) + "\n")  # JSON is YAML
        self._log(name, "INFO", text)

    def _create(self, run: Run) -> None:
        model = {"path": run.base_model, "lora": {"rank": run.lora.rank}}
        facts = {
            "trainer": {"run_name": run.model_id, "seed": run.lora.seed, "policy": {"model": model}},
            "tinker": {"tenant": run.tenant, "session_id": run.session_id, "lora": msgspec.structs.asdict(run.lora)},
        }
        self._write_start(
            run.model_id, facts, f"step 0: created from {run.base_model} with LoRA of rank {run.lora.rank}"
        )

    def _step(self, model_id: str, metrics: dict[str, float]) -> None:
        progress = self._get_progress(model_id)
        row = progress.build_row(metrics)
        self._progress[model_id] = _Progress(progress.step + 1, time.monotonic(), tenant=progress.tenant)
        self._write_line(model_id, "metrics.jsonl", json.dumps(row))
        loss = f": loss {row['train/loss']:.5g}" if "train/loss" in row else ""
        self._log(model_id, "INFO", f"step {int(row['step'])}{loss}")

    def _save_sample(self, samples: KeptSamples, model_id: str, pending: PendingRequest, body: bytes) -> None:
        """Keep a sample of a model of the same tenant: others sample from weights that are public, or given to them,
        and their prompts are not for the owner's eyes."""
        try:
            command, progress = pending.stored.command, self._get_progress(model_id)
            if progress.tenant is None:
                progress.tenant = _read_tenant(self._get_path(model_id))
            if isinstance(command, Sample) and progress.tenant == pending.tenant:
                output = decode_sample_output(body)
                samples.add(self._get_path(model_id), progress.step, pending.request_id, command.spec.prompt, output)
        finally:
            with self._lock:
                self._sample_bytes -= len(body)

    def _write_end(self, model_id: str) -> None:
        self._log(model_id, "INFO", "this run is finished: its model was unloaded")
        self._progress.pop(model_id, None)

    def _write_numbers(self, row: dict[str, float]) -> None:
        progress = self._get_progress(SERVER)
        progress.step += 1
        self._write_line(SERVER, "metrics.jsonl", json.dumps({"step": progress.step, "time": time.time(), **row}))

    def _remove_oldest(self, max_bytes: float, live: set[str]) -> None:
        removed, failed, num_bytes = remove_oldest(self._folder, max_bytes, live)
        if removed:
            log.info("max_runs_gb=%g: run folders removed: %s", max_bytes / 1e9, ", ".join(removed))
            gone = {model_id for model_id in self._progress if self._get_path(model_id).name in removed}
            self._progress = {model_id: each for model_id, each in self._progress.items() if model_id not in gone}
        for name, error in failed.items():
            if name not in self._not_removed:
                log.warning("max_runs_gb=%g: run folder %s cannot be removed: %s", max_bytes / 1e9, name, error)
        self._not_removed = set(failed)
        is_full = num_bytes > max_bytes
        if is_full and not self._is_full:
            log.warning(
                "run folders of live models take %.3g GB, above max_runs_gb=%g, so run folders of unloaded models "
                "are removed immediately: unload models, or raise the limit",
                num_bytes / 1e9, max_bytes / 1e9,
            )  # fmt: skip
        self._is_full = is_full

    def _get_progress(self, name: str) -> _Progress:
        """Return the progress of a model; after a restart of the server, read it from the last line."""
        if name not in self._progress:
            self._progress[name] = _Progress(_read_last_step(self._get_path(name) / "metrics.jsonl"), time.monotonic())
        return self._progress[name]

    def _log(self, name: str, level: str, text: str) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        path = self._get_path(name) / "logs" / "trainer.log"
        if path.exists() and path.stat().st_size >= MODEL_LOG_BYTES:
            path.replace(path.with_name("trainer.log.1"))
        self._write_line(name, "logs/trainer.log", f"{when} {level:<8} {' '.join(text.split())[:_MAX_ERROR]}")

    def _write_line(self, name: str, file: str, line: str) -> None:
        path = self._get_path(name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # a full disk, or a kill
            os.write(descriptor, f"{chr(10) * is_torn}{line}\n".encode("utf-8", "replace"))
        finally:
            os.close(descriptor)


def get_server_log_path(folder: Path) -> Path:
    """Return the path of the server's log."""
    return folder / SERVER / "logs" / "server.log"


def log_to_file(path: Path) -> None:
    """Write the log of this process to a file, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=NUM_OLD_LOGS, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def _format_checkpoint_event(pending: PendingRequest, run: Run) -> str:
    save = pending.stored.save
    if save is None:
        return "weights loaded from a checkpoint"
    if save.name is None:
        return f"weights saved for sampler {save.sampling_session_seq_id}"
    return f"checkpoint saved: {TinkerPath(run.model_id, save.kind, save.name)}"


def _read_tenant(run: Path) -> str | None:
    """Return the tenant of a run folder, None if not recorded."""
    try:
        return json.loads((run / "config.yaml").read_bytes())["tinker"]["tenant"]
    except (FileNotFoundError, ValueError, KeyError):
        return None


def _read_last_step(path: Path) -> int:
    """Return the step of the last whole line of a file of metrics; 0 without one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
