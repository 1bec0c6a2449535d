"""A tiny software task, a model that solves it, and faults that befall the first trajectory of an instance."""

import asyncio
import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_agent.config.task_file import read_task
from skyrl_agent.errors import InfraError
from skyrl_agent.integrations.base import BACKEND_REGISTRY, Backend, plain_rows, published_output
from skyrl_agent.runner import AgentRunner
from skyrl_agent.runtimes import Runtime
from skyrl_agent.runtimes.leases import leases
from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.local_swe import LocalSWETask
from skyrl_agent.testing import ScriptedModel, byte_tokenizer

from ..runtimes.runtime_places import long_sleep
from .swe_oracle import call

STAGES = ("initialize", "generate", "evaluate")
PLANS = ("async_pipeline", "async_batch", "async_batch_bounded", "async_fix_pool")
HANG = long_sleep()
STAGE_SECONDS = 8.0
WORD = "mend"

Fault = Callable[[Runtime], Any]


async def exception(runtime: Runtime) -> None:
    raise ValueError("a bug")


async def hang(runtime: Runtime) -> None:
    await runtime.exec(f"setsid {HANG} & {HANG}", timeout=900.0)


async def slow_tail(runtime: Runtime) -> None:
    await asyncio.sleep(STAGE_SECONDS / 4)


async def dead_sandbox(runtime: Runtime) -> None:
    """Somebody deletes its folder."""
    (lease,) = [lease for lease in leases() if lease.id == runtime.id]
    assert lease.folder is not None
    await asyncio.to_thread(shutil.rmtree, lease.folder)
    await runtime.exec("true")


async def full_disk(runtime: Runtime) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def short_outage(runtime: Runtime) -> None:
    raise InfraError("away for a moment")


ALL = (exception, hang, slow_tail, dead_sandbox, full_disk, short_outage)
FAULTS: dict[str, Fault] = {fault.__name__.replace("_", " "): fault for fault in ALL}


@dataclass
class Once:
    """Says of each thing, the first time it is asked, that it is the first time."""

    seen: set[Any] = field(default_factory=set)

    def __call__(self, thing: Any) -> bool:
        is_first = thing not in self.seen
        self.seen.add(thing)
        return is_first


class FaultyTask(LocalSWETask):
    """Rows may name a `fault`, and the `stage` in which it befalls their first trajectory."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.limits = replace(self.limits, workspace_bytes=16 << 20)
        self._once = Once()
        self.reached = asyncio.Event()
        """A fault has begun."""

    async def _befall(self, stage: str, instance: Instance, runtime: Runtime) -> None:
        row = instance.row
        if row.get("stage") == stage and row["fault"] in FAULTS and self._once(instance.instance_id):
            self.reached.set()
            await FAULTS[row["fault"]](runtime)

    async def initialize_runtime(self, instance, runtime):
        await self._befall("initialize", instance, runtime)

    async def complete_runtime(self, instance, runtime, result):
        await self._befall("generate", instance, runtime)
        return await super().complete_runtime(instance, runtime, result)

    async def evaluate_result(self, result, instance, trajectory, runtime=None):
        assert runtime is not None
        await self._befall("evaluate", instance, runtime)
        return await super().evaluate_result(result, instance, trajectory, runtime)


class Engine(ScriptedModel):
    """Dies under the first trajectory of the instance that says so; fills the disk of another."""

    once: Once

    async def async_generate_ids(self, *, input_ids, sampling_params, request_id):
        prompt = self.tokenizer.decode(input_ids, skip_special_tokens=False)
        if "dead engine" in prompt and self.once("dead engine"):
            raise InfraError("the engine does not answer")
        return await super().async_generate_ids(
            input_ids=input_ids, sampling_params=sampling_params, request_id=request_id
        )


def mend(prompt: str, turn: int) -> str:
    fill = "for i in 1 2 3 4; do head -c 8M /dev/urandom > big$i; done; sleep 2" if "filled disk" in prompt else "ls"
    answers = [fill, f"rm -f big*; echo {WORD}ed > it.txt"]
    return [*(call("bash", command=command) for command in answers), call("finish", answer="done")][turn]


def row(stage: str = "", fault: str = "") -> dict[str, Any]:
    return {
        "id": f"{stage}, {fault}",
        "files": {"it.txt": "broken\n"},
        "test_cmd": f"grep -q {WORD}ed it.txt",
        "problem_statement": f"Make it whole. ({fault})",
        "stage": stage,
        "fault": fault,
    }


def faulty_runner(plan: str, retries: int = 0, **dispatcher: Any) -> AgentRunner:
    """Three trajectories of each instance, 8 at a time."""
    BACKEND_REGISTRY["itself"] = Backend(lambda infer_engine, **_: infer_engine, plain_rows, published_output)
    limits = {"timeout_seconds": STAGE_SECONDS, "retries": retries}
    cfg = {
        "agent_cls": "skyrl_agent.agents.codeact.CodeActAgent",
        "task": f"{__name__}.FaultyTask",
        "data": {"instance_id_key": "id"},
        "generator": {"infer_backend": "itself", "num_trajectories": 3, "max_prompt_length": 20_000},
        "dispatcher": {
            "type": plan,
            **dict.fromkeys(("max_parallel_agents", "max_eval_parallel_agents"), 8),
            **dict.fromkeys(STAGES, limits),
            **dispatcher,
        },
        "runtime": {"kind": "local"},
    }
    tokenizer = byte_tokenizer()
    engine = Engine(tokenizer, mend)
    engine.once = Once()
    return AgentRunner(read_task(cfg), engine, tokenizer)
