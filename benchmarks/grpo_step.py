"""Samples per second of a whole GRPO step, compared with TRL; steps are interleaved.

    python benchmarks/grpo_step.py --steps 10

A step is everything between two batches of prompts: generating, rewards, log-probs, advantages, forward and backward,
the optimizer, new weights in the engine, metrics and trajectories on disk. Ours is the real loop (`BasePPOExp`: policy
ranks under FSDP2 and engines, each a Ray process of one thread), once on policy and once with trajectories of weights
one step older (`trainer.fully_async`), which are generated while the ranks train. TRL is on policy and generates with
transformers, in one or several separate processes; the fastest configuration counts. Prints a markdown table. TRL comes
with the dependency group `bench`.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; TRL's processes set their own number
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import psutil
import ray
from benchmark_tools import NUM_TEMPLATE_TOKENS, describe_machine, make_word_model

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config import SkyRLConfig
from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.utils import initialize_ray
from skyrl_train.utils.process_log import capture_output, configure_logging

LEARNING_RATE = 1e-5
DEADLINE_SECONDS = 600.0
"""Timeout of one step of a peer, its start included."""


# ---- what both train


@dataclass(frozen=True)
class Work:
    """Sizes of a step and of its model, a Qwen3; 3.3 million parameters by default."""

    prompts: int = 8
    samples: int = 8
    """Of each prompt."""
    prompt_tokens: int = 32
    new_tokens: int = 64
    """Of each answer, exactly."""
    hidden: int = 256
    layers: int = 4

    @property
    def answers(self) -> int:
        return self.prompts * self.samples

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        for size in fields(cls):
            option = f"--{size.name.replace('_', '-')}"
            parser.add_argument(option, type=int, default=size.default, help="of a step, or of the model")

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Work":
        return cls(**{size.name: getattr(options, size.name) for size in fields(cls)})


def make_prompts(count: int, num_tokens: int) -> list[dict[str, Any]]:
    """Return dataset rows with prompts of exactly this length under the chat template."""
    random_generator = random.Random(0)
    length = num_tokens - NUM_TEMPLATE_TOKENS
    texts = [" ".join(f"w{random_generator.randrange(400)}" for _ in range(length)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def reward_of(text: str) -> float:
    """Measure how varied a response is: cheap, and different for every sample."""
    words = text.split()
    return len(set(words)) / max(1, len(words))


class VariedWords(BaseTextEnv):
    """`reward_of` as an environment."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=reward_of(action), done=True, metadata={})


# ---- ours


@dataclass
class Steps:
    """Times of one contender's counted steps."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    cpu_of_processes: list[dict[str, float]] = field(default_factory=list)
    """CPU seconds of each kind of process; peers have none."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def median_stage(self, name: str) -> float:
        return statistics.median(stages.get(name, 0.0) for stages in self.stages)


class Watch:
    """Times of a trainer's steps. Between two of them it is the others' turn."""

    def __init__(self, between_steps: Callable[[], None], cpu_clock: Callable[[], dict[str, float]]):
        self.steps = Steps()
        self._between_steps, self._cpu_clock = between_steps, cpu_clock
        self._began: tuple[dict[str, float], float] | None = None

    def begin(self) -> None:
        """Begin a step after the others' turn."""
        self._between_steps()
        self._began = self._cpu_clock(), time.perf_counter()

    def end(self) -> None:
        """End the step that has begun, if one has."""
        if self._began is None:
            return
        (cpu, began), self._began = self._began, None
        self.steps.seconds.append(time.perf_counter() - began)
        used = {kind: seconds - cpu.get(kind, 0.0) for kind, seconds in self._cpu_clock().items()}
        self.steps.cpu_of_processes.append(used)
        self.steps.cpu_seconds.append(sum(used.values()))


class MeasuredTrainer(RayPPOTrainer):
    """The trainer, with a watch from one batch of prompts to the next."""

    watch: Watch

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        for prompts in super().batches():
            self.watch.begin()
            yield prompts
            self.watch.end()

    def log(self) -> None:
        if self.global_step:
            self.watch.steps.stages.append(dict(self.all_timings))
        super().log()


class MeasuredAsyncTrainer(FullyAsyncRayPPOTrainer):
    """Asynchronous trainer that measures step durations. When a step ends, the groups of the next one are finished and
    no others run: each step trains and generates one batch, and the trainer is idle during the peers' steps.
    """

    watch: Watch

    async def sync_weights(self) -> None:
        if self.pool is None:
            return await super().sync_weights()
        await self.pool.drain()
        await RayPPOTrainer.sync_weights(self)

    async def after_step(self) -> None:
        await super().after_step()
        assert self.pool is not None
        self.watch.end()
        if self.global_step < self.total_training_steps:
            self.watch.begin()
            self.pool.record_synced(self.weight_version)

    def log(self) -> None:
        if self.global_step > 1:  # the first step generates two batches and has no watch
            self.watch.steps.stages.append(dict(self.all_timings))
        super().log()


class MeasuredExperiment(BasePPOExp):
    """The real experiment with the measured trainer."""

    def __init__(self, cfg: SkyRLConfig, between_steps: Callable[[], None], cpu_clock: Callable[[], dict[str, float]]):
        super().__init__(cfg)
        self.watch = Watch(between_steps, cpu_clock)

    @property
    def steps(self) -> Steps:
        return self.watch.steps

    def get_trainer(self, **arguments: Any) -> RayPPOTrainer:
        kind = MeasuredAsyncTrainer if self.cfg.trainer.fully_async.enabled else MeasuredTrainer
        trainer = kind(**arguments)
        trainer.watch = self.watch
        return trainer


Schedule = Literal["on policy", "one step off policy"]
SCHEDULES: tuple[Schedule, ...] = "on policy", "one step off policy"


def processes_of(options: argparse.Namespace, schedule: Schedule) -> tuple[int, int]:
    """Return the numbers of ranks and engines: half as many of each where both compute at the same time."""
    share = 1 if schedule == "on policy" else 2
    return max(1, options.ranks // share), max(1, options.engines // share)


def our_settings(
    options: argparse.Namespace, work: Work, dtype: str, folder: Path, schedule: Schedule = "on policy"
) -> SkyRLConfig:
    """One optimizer step a training step, without KL: what TRL does by default."""
    is_off_policy = schedule != "on policy"
    num_steps = options.warmup + options.steps + is_off_policy  # whose first step fills the queue
    ranks, engines = processes_of(options, schedule)
    rows_of_rank = work.answers // ranks
    trainer = {
        "policy": {
            "model": {"path": str(folder / "model")},
            "optimizer_config": {"lr": LEARNING_RATE},
            # As TRL's processes do, each rank keeps the whole model.
            "fsdp_config": {"fsdp_size": 1, "reshard_after_forward": False},
        },
        "placement": {"device": "cpu", "policy_num_gpus_per_node": ranks, "colocate_all": not is_off_policy},
        # The ratio to the weights that generated, where those are older.
        "algorithm": {"use_kl_loss": False, "policy_loss_type": "rollout_is" if is_off_policy else "regular"},
        "fully_async": {"enabled": True, "max_staleness_steps": 1, "pause": "wait"} if is_off_policy else {},
        "train_batch_size": work.prompts,
        "policy_mini_batch_size": work.prompts,
        "micro_train_batch_size_per_gpu": min(options.micro_batch, rows_of_rank),
        "micro_forward_batch_size_per_gpu": min(options.micro_batch, rows_of_rank),
        "max_training_steps": num_steps,
        "max_prompt_length": work.prompt_tokens,
        "bf16": dtype == "bfloat16",
        "gradient_checkpointing": False,
        "eval_interval": -1,
        "ckpt_interval": -1,
        "print_example_interval": -1,
        "resume_mode": "none",
        "run_dir": str(folder / f"run-{dtype}-{schedule.split()[0]}"),
    }
    generator = {
        "model_dtype": dtype,
        "num_inference_engines": engines,
        "n_samples_per_prompt": work.samples,
        "sampling_params": {"max_generate_length": work.new_tokens, "additional_kwargs": {"ignore_eos": True}},
    }
    return SkyRLConfig.from_dict(
        {
            "data": {"train_data": [str(folder / "train.jsonl")], "val_data": []},
            "trainer": trainer,
            "generator": generator,
            "environment": {"env_class": "varied_words"},
        }
    )


def cpu_clock_without(peer_pids: Sequence[int]) -> Callable[[], dict[str, float]]:
    """A clock of the CPU seconds of this process and everything it started, but for the peers."""

    def seconds() -> dict[str, float]:
        total = defaultdict[str, float](float)
        own = psutil.Process()
        for process in [own, *own.children(recursive=True)]:
            try:
                if process.pid not in peer_pids:
                    times = process.cpu_times()
                    total[kind_of(process) if process != own else "driver"] += times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return total

    return seconds


def kind_of(process: psutil.Process) -> str:
    """Kind of one of Ray's processes: `ray::Actor.method` is the name of one that runs an actor."""
    name = " ".join(process.cmdline()[:1])
    if not name.startswith("ray::"):
        return "Ray itself"
    return "engines" if "Engine" in name else "ranks" if "Worker" in name else name


# ---- TRL


@dataclass(frozen=True)
class PeerShape:
    """A way to run TRL on a CPU."""

    processes: int
    threads: int

    @property
    def name(self) -> str:
        return f"TRL, {counted(self.processes, 'process')} x {counted(self.threads, 'thread')}"


PEER_SHAPES = {"1x1": PeerShape(1, 1), "1x2": PeerShape(1, 2), "2x1": PeerShape(2, 1)}


class Peer:
    """Steps of another trainer in separate processes, run on request.

    Args:
        process: called in each process with its connection, rank, and `arguments`; sends the seconds and CPU seconds of
            each requested step, and any pair of numbers when it is ready.
    """

    def __init__(self, name: str, num_processes: int, process: Callable[..., None], *arguments: Any):
        self.name = name
        self.steps = Steps()
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(num_processes):
            ours, theirs = context.Pipe()
            started = context.Process(target=process, args=(theirs, rank, *arguments), daemon=True)
            started.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(started)
        self._receive()  # ready

    def take_step(self) -> None:
        for connection in self._connections:
            connection.send("step")
        answers = self._receive()
        self.steps.seconds.append(max(seconds for seconds, _ in answers))
        self.steps.cpu_seconds.append(sum(cpu_seconds for _, cpu_seconds in answers))

    def _receive(self) -> list[tuple[float, float]]:
        answers = []
        for connection in self._connections:
            if not connection.poll(DEADLINE_SECONDS):
                raise TimeoutError(f"{self.name} did not answer within {DEADLINE_SECONDS:g} s")
            answers.append(connection.recv())
        return answers

    def stop(self) -> None:
        for connection, process in zip(self._connections, self.processes, strict=True):
            if process.is_alive():
                connection.send("stop")
            process.join(20)
            process.kill()
            process.join(20)


def trl_process(
    connection: Connection,
    rank: int,
    shape: PeerShape,
    work: Work,
    port: int,
    num_steps: int,
    dtype: str,
    folder: Path,
) -> None:
    """One rank of TRL: `num_steps` steps of GRPOTrainer, each when the parent says so."""
    capture_output(folder / f"trl-{dtype}-{shape.processes}x{shape.threads}-{rank}.log")
    os.environ.update(OMP_NUM_THREADS=str(shape.threads), ACCELERATE_USE_CPU="true")
    if shape.processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(shape.processes))
        os.environ.update(LOCAL_WORLD_SIZE=str(shape.processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

    torch.set_num_threads(shape.threads)

    class InTurn(TrainerCallback):
        """Waits for the parent before a step; the step ends where the next would begin."""

        began: tuple[float, float] | None = None

        def _tell(self) -> None:
            seconds, cpu_seconds = self.began or (0.0, 0.0)
            connection.send((time.perf_counter() - seconds, time.process_time() - cpu_seconds))

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._tell()
            connection.recv()
            self.began = time.perf_counter(), time.process_time()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._tell()

    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float | None]:
        return [reward_of(messages[0]["content"]) for messages in completions]

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=trl_config(shape, work, num_steps, dtype, folder),
        train_dataset=Dataset.from_list(rows),
        callbacks=[InTurn()],
    )
    trainer.train()
    connection.recv()  # taking down a process is work: not while our last step is being timed


def trl_config(shape: PeerShape, work: Work, num_steps: int, dtype: str, folder: Path) -> Any:
    """GRPOConfig of one rank: the same work as ours."""
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports, reportPrivateImportUsage]

    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=dtype == "bfloat16",
        per_device_train_batch_size=work.answers // shape.processes,
        gradient_accumulation_steps=1,
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens},
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=num_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
    )


# ---- both


@dataclass
class Result:
    """Result of one number format and schedule: our steps and each peer's, without warm-up."""

    dtype: str
    schedule: Schedule
    work: Work
    ours: Steps
    peers: dict[str, Steps]
    load: list[float]

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=lambda name: self.peers[name].median, default=None)


def measure(options: argparse.Namespace, dtype: str, folder: Path) -> list[Result]:
    """Measure each schedule together with the same peers."""
    schedules: list[Schedule] = [SCHEDULES[0]] if options.on_policy_alone else list(SCHEDULES)
    num_steps, work = options.warmup + options.steps, Work.of(options)
    peers: list[Peer] = []
    try:
        if not options.skip_trl:
            for shape in [PEER_SHAPES[name] for name in options.trl]:
                arguments = shape, work, find_free_port(), num_steps * len(schedules), dtype, folder
                peers.append(Peer(shape.name, shape.processes, trl_process, *arguments))
        return [measure_beside(peers, options, dtype, folder, schedule) for schedule in schedules]
    finally:
        for peer in peers:
            peer.stop()


def measure_beside(
    peers: Sequence[Peer], options: argparse.Namespace, dtype: str, folder: Path, schedule: Schedule
) -> Result:
    """Run the real experiment; before each of its steps every peer takes one."""
    work, load = Work.of(options), list[float]()
    for peer in peers:
        peer.steps = Steps()

    def between_steps() -> None:
        load.append(os.getloadavg()[0])
        for peer in peers:
            peer.take_step()

    cfg = our_settings(options, work, dtype, folder, schedule)
    try:
        initialize_ray(MeasuredExperiment.validate(cfg))
        clock = cpu_clock_without([process.pid for peer in peers for process in peer.processes])
        experiment = MeasuredExperiment(cfg, between_steps, clock)
        experiment.run()
    finally:
        ray.shutdown()
    for steps in [experiment.steps, *(peer.steps for peer in peers)]:
        for values in (steps.seconds, steps.cpu_seconds, steps.stages, steps.cpu_of_processes):
            del values[: options.warmup]
    return Result(dtype, schedule, work, experiment.steps, {peer.name: peer.steps for peer in peers}, load)


# ---- telling


STAGES = (
    "generate",
    "wait_for_generation_buffer",
    "fwd_logprobs_values_reward",
    "compute_advantages_and_returns",
    "train_critic_and_policy",
    "run_training",
    "sync_weights",
)


def report(results: Sequence[Result], options: argparse.Namespace) -> str:
    """Format the measurements and the machine as Markdown."""
    lines = [
        "| dtype | trainer | samples/s | seconds a step (median) | min - max | ours is | CPU seconds a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        ranks, engines = processes_of(options, result.schedule)
        us = f"ours, {result.schedule}, {counted(ranks, 'rank')} + {counted(engines, 'engine')}"
        for name, steps in {us: result.ours, **result.peers}.items():
            ratio = "" if name == us else f"{steps.median / result.ours.median:.2f}x"
            mark = " (its best)" if name == result.best_peer else ""
            lines.append(
                f"| {result.dtype} | {name}{mark} | {result.work.answers / steps.median:.1f} | {steps.median:.2f} | "
                f"{min(steps.seconds):.2f} - {max(steps.seconds):.2f} | {ratio} | "
                f"{statistics.median(steps.cpu_seconds):.2f} |"
            )
    names = [name for name in STAGES if any(result.ours.median_stage(name) for result in results)]
    header = " | ".join(f"timing/{name}" for name in names)
    lines += ["", f"| seconds of our step | {header} | all else |", "|---|" + "---|" * (len(names) + 1)]
    for result in results:
        stages = [result.ours.median_stage(name) for name in names]
        cells = " | ".join(f"{seconds:.3f}" for seconds in [*stages, result.ours.median - sum(stages)])
        lines.append(f"| {result.dtype}, {result.schedule} | {cells} |")
    kinds = sorted({kind for result in results for used in result.ours.cpu_of_processes for kind in used})
    lines += ["", f"| CPU seconds of our step | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
    for result in results:
        used = [statistics.median(step.get(kind, 0.0) for step in result.ours.cpu_of_processes) for kind in kinds]
        lines.append(f"| {result.dtype}, {result.schedule} | {' | '.join(f'{seconds:.2f}' for seconds in used)} |")
    load = [value for result in results for value in result.load]
    return "\n".join(
        [
            *lines,
            "",
            f"{describe_machine('transformers', 'ray', 'trl')}.",
            f"Load average while measuring: {min(load):.1f} to {max(load):.1f}, median {statistics.median(load):.1f}.",
            f"Steps counted: {options.steps}, after {options.warmup} others.",
        ]
    )


def counted(number: int, noun: str) -> str:
    """ "1 rank", "2 ranks", "2 processes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10, help="steps that count")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them that do not")
    parser.add_argument("--ranks", type=int, default=2, help="our policy ranks")
    parser.add_argument("--engines", type=int, default=2, help="our engines")
    parser.add_argument("--micro-batch", type=int, default=32, help="our sequences in one forward and backward")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument(
        "--trl", nargs="+", default=list(PEER_SHAPES), choices=list(PEER_SHAPES), help="processes x threads of TRL"
    )
    parser.add_argument("--on-policy-alone", action="store_true", help="without training one step off policy")
    parser.add_argument("--skip-trl", action="store_true", help="ours alone")
    Work.add_arguments(parser)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    configure_logging()
    skyrl_gym.register(id="varied_words", entry_point=VariedWords)
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as name:
        folder = Path(name)
        work = Work.of(options)
        context = 2 * (work.prompt_tokens + work.new_tokens)
        make_word_model(folder / "model", hidden=work.hidden, layers=work.layers, context=context)
        rows = make_prompts(work.prompts * (options.warmup + options.steps + 1), work.prompt_tokens)
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        results = [result for dtype in options.dtypes for result in measure(options, dtype, folder)]
    print(report(results, options))


if __name__ == "__main__":
    sys.exit(main())
