"""A failed rollout is data: recorded by what failed, training nothing, ending neither the batch nor the others."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
import weakref

import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.error import InfraError
from skyrl_train.errors import ConfigError, RolloutError, WorkerError
from skyrl_train.generators import skyrl_gym_generator
from skyrl_train.generators.agent_loop import EngineSession
from skyrl_train.generators.base import BatchMetadata, Failure, TrainingPhase, TrajectoryID
from skyrl_train.generators.environment import DaemonThreads, DeadlineExceeded
from skyrl_train.generators.sampling import compute_episode_seed, compute_request_seed
from skyrl_train_testing.tiny_runs import register_environments

GOOD = {"steps": [{"reward": 1.0}], "name": "good"}


@pytest.fixture(autouse=True)
def retry_immediately(monkeypatch):
    monkeypatch.setattr(skyrl_gym_generator, "RETRY_DELAY_SECONDS", 0.0)


def bad(**faults):
    return {"steps": [{"reward": 1.0}], "name": "bad", **faults}


@pytest.mark.parametrize("method", ["make", "init", "step", "get_metrics", "close"])
async def test_environment_error_fails_only_own_trajectory(game, say, characters, environments, method):
    extras = [bad(raises={method: RuntimeError("boom")}), GOOD]
    played = await game(characters, [[say("a")], [say("b")]], extras).play()
    output = played.output
    failure, none = output["failures"]
    assert (failure.kind, none) == ("environment", None)
    assert failure.message.startswith(f"environment 'scripted': {method} raised RuntimeError: boom (/")
    assert "conftest.py:" in failure.message and ': raise self.extras["raises"][method])' in failure.message
    assert output["stop_reasons"] == ["error", "stop"]
    assert output["rewards"][1] == [0.0, 1.0]
    assert set(output["rewards"][0]) == {0.0} and set(output["loss_masks"][0]) == {0}
    assert (
        len(output["response_ids"][0]) == len(output["weight_versions"][0]) == len(output["rollout_logprobs"][0]) >= 1
    )
    assert output["prompt_token_ids"][0] == output["prompt_token_ids"][1]
    assert environments.closed.count("bad") == (0 if method == "make" else 1)
    metrics = output["rollout_metrics"]
    assert metrics["generate/num_failed/environment"] == 1.0
    assert metrics["generate/num_failed/infrastructure"] == 0.0
    assert metrics["generate/stop_reason/error"] == 0.5
    assert metrics["generate/avg_num_tokens"] == 2.0  # the good one's


async def test_failed_trajectory_keeps_partial_tokens(game, say, characters):
    played = await game(characters, [[say("ab")]], [bad(raises={"step": RuntimeError("boom")})]).play()
    assert characters.decode(played.output["response_ids"][0]) == "ab<|im_end|>"
    assert played.output["rollout_logprobs"] == [[-1.0, -2.0, -3.0]]


@pytest.mark.parametrize("method", ["make", "init", "step", "close"])
async def test_hanging_environment_is_abandoned_at_deadline(game, say, characters, method):
    extras = [bad(sleeps={method: 30.0}), GOOD]
    started = time.monotonic()
    played = await game(
        characters, [[say("a")], [say("b")]], extras, gym={"env_timeout_seconds": 0.2, "max_env_workers": 1}
    ).play()
    assert time.monotonic() - started < 5.0
    failure = played.output["failures"][0]
    assert failure.kind == "environment"
    assert f"{method} did not return within 0.2 s (environment.skyrl_gym.env_timeout_seconds)" in failure.message
    assert played.output["failures"][1] is None  # the one thread there may be was not lost to the other


async def test_async_environment_runs_on_event_loop_with_same_deadline(game, say, characters):
    extras = [GOOD, bad(sleeps={"astep": 30.0})]
    played = await game(
        characters, [[say("a")], [say("b")]], extras, env_class="scripted_async", gym={"env_timeout_seconds": 0.2}
    ).play()
    assert played.output["rewards"][0] == [0.0, 1.0]
    assert "step did not return" in played.output["failures"][1].message


async def test_environments_run_without_threads(game, say, characters):
    played = await game(characters, [[say("a")]], [GOOD], gym={"max_env_workers": 0}).play()
    assert played.output["rewards"] == [[0.0, 1.0]]


@pytest.mark.parametrize("reward", [None, float("nan"), "1", True, -(10**309), pytest.param(10**5000, id="long")])
async def test_non_finite_reward_is_reward_failure(game, say, characters, reward):
    played = await game(characters, [[say("a")]], [{"steps": [{"reward": reward}]}]).play()
    assert played.output["failures"][0].kind == "reward"
    assert played.output["rewards"] == [[0.0, 0.0]]


@pytest.mark.parametrize("metrics", [None, 3, [("turns", 1)]])
async def test_metrics_other_than_dict_are_environment_failure(game, say, characters, metrics):
    extras = [{"steps": [{"reward": 1.0}], "metrics": metrics}]
    played = await game(characters, [[say("a")]], extras, settings={"max_rollout_retries": 0}).play()
    assert played.output["failures"][0].kind == "environment"
    assert "get_metrics must return a dict" in played.output["failures"][0].message


async def test_environment_may_report_failure_kind(game, say, characters):
    played = await game(
        characters, [[say("a")]], [bad(raises={"step": RolloutError("tool", "no search server")})]
    ).play()
    assert played.output["failures"] == [Failure("tool", "no search server")]


async def test_endless_episode_is_stopped(game, say, characters):
    extras = [{"steps": [{"says": ""}] * 3}]
    settings = {"use_conversation_multi_turn": False}
    played = await game(characters, [[say(""), say("")]], extras, settings=settings).play()
    assert "would never end" in played.output["failures"][0].message


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError()])
async def test_infrastructure_failure_is_retried_with_new_environment(game, say, characters, environments, error):
    steps = [{"reward": 0.5, "says": "x"}, {"reward": 1.0}]
    # the second turn fails; then both turns again
    answers = [[say("a"), error, say("a"), say("b")]]
    played = await game(characters, answers, [{"steps": steps, "name": "env"}]).play()
    assert played.output["failures"] == [None]
    assert sum(played.output["rewards"][0]) == 1.5
    assert environments.closed == ["env", "env"]
    assert played.output["rollout_metrics"]["generate/num_retries"] == 1.0


async def test_persistent_infrastructure_failure_is_recorded_after_retries(game, say, characters):
    answers = [[ConnectionError("gone")] * 3, [say("b")]]
    played = await game(characters, answers, [bad(), GOOD], settings={"max_rollout_retries": 2}).play()
    assert len(played.engine.requests) == 3 + 1
    failure = Failure("infrastructure", "the engine raised ConnectionError: gone")
    assert played.output["failures"] == [failure, None]
    assert played.output["rewards"][0] == [0.0]


async def test_unavailable_environment_service_is_retried_then_recorded(game, say, characters, environments):
    """Never a reward of 0: a search server that is down says nothing about the answer."""
    extras = [bad(raises={"step": InfraError("Search error: nobody listens")}), GOOD]
    played = await game(
        characters, [[say("a"), say("a")], [say("b")]], extras, settings={"max_rollout_retries": 1}
    ).play()
    message = "environment 'scripted': step depends on an unavailable service: Search error: nobody listens"
    assert played.output["failures"] == [Failure("infrastructure", message), None]
    assert environments.closed.count("bad") == 2
    assert set(played.output["loss_masks"][0]) == {0}


async def test_aborted_request_is_infrastructure_failure(game, say, characters):
    played = await game(characters, [[say("a", stop_reason="abort"), say("b")]], [bad()]).play()
    assert played.output["failures"] == [None]
    assert characters.decode(played.output["response_ids"][0]) == "b<|im_end|>"


async def test_request_refused_by_engine_is_not_retried(game, say, characters):
    played = await game(characters, [[ValueError("token id 9999 is outside the vocabulary")]], [bad()]).play()
    refused = "the engine refused the request: token id 9999 is outside the vocabulary"
    assert played.output["failures"] == [Failure("model", refused)]
    assert len(played.engine.requests) == 1


async def test_unresponsive_engine_times_out(characters, say, scripted_engine):
    class SilentEngine(scripted_engine):
        async def generate(self, request):
            await asyncio.sleep(60)

    session = EngineSession(SilentEngine(characters, {}), {}, "0_0", lambda turn: turn, 0.1)
    with pytest.raises(RolloutError, match=r"generator\.request_timeout_seconds=0\.1") as caught:
        async with session.deadline():
            await session.engine.generate(session.build_request([1], 0, 5))
    assert caught.value.kind == "infrastructure"


async def test_unknown_environment_raises_before_generation(game, say, characters):
    with pytest.raises(ConfigError, match="scripted"):
        await game(characters, [[say("a")]], [GOOD], env_class="scripte").play()


async def test_unrenderable_message_is_environment_failure(game, say, characters):
    played = await game(characters, [[say("a"), say("b")]], [{"steps": [{"says": 3}, {}]}]).play()
    failure = played.output["failures"][0]
    assert failure.kind == "environment" and "the chat template cannot render these messages" in failure.message


async def test_samples_do_not_share_extras(game, say, characters):
    shared = {"steps": [{"reward": 1.0}], "list": []}
    await game(characters, [[say("a")], [say("b")]], [shared, shared]).play()
    assert shared == {"steps": [{"reward": 1.0}], "list": []}


async def test_cancellation_closes_environments_and_propagates(game, say, characters, environments):
    task = asyncio.create_task(game(characters, [[say("a")]], [bad(sleeps={"step": 0.5})]).play())
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environments.closed == ["bad"]


async def test_results_after_deadline_are_discarded():
    discarded = []

    def slow():
        time.sleep(0.2)
        return "late"

    with pytest.raises(DeadlineExceeded):
        await DaemonThreads(max_workers=1, timeout_seconds=0.05).call(slow, discard=discarded.append)
    await asyncio.sleep(0.4)
    assert discarded == ["late"]


async def test_environment_calling_exit_ends_only_own_call():
    with pytest.raises(RuntimeError, match="raised SystemExit: 3"):
        await DaemonThreads(max_workers=1, timeout_seconds=5).call(sys.exit, 3)


def test_hanging_call_does_not_block_process_exit():
    code = (
        "import asyncio, time\n"
        "from skyrl_train.generators.environment import DaemonThreads, DeadlineExceeded\n"
        "try: asyncio.run(DaemonThreads(1, 0.1).call(time.sleep, 600))\n"
        "except DeadlineExceeded as error: print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "did not return within 0.1 s"


def test_concurrent_calls_are_limited_by_workers():
    running, most = 0, 0

    def work():
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    async def many(threads):
        await asyncio.gather(*(threads.call(work) for _ in range(9)))

    threads = DaemonThreads(max_workers=3, timeout_seconds=5)
    for _ in range(2):  # the same threads serve another event loop
        asyncio.run(many(threads))
    assert most == 3


async def test_request_seeds_are_distinct_and_repeatable(game, say, characters):
    async def seeds(seed):
        answers = [[say("a"), say("b")], [say("a"), say("b")]]
        extras = [{"steps": [{"says": "x"}, {}]} for _ in answers]
        played = await game(characters, answers, extras, settings={"seed": seed}).play()
        return sorted(request.sampling_params["seed"] for request in played.engine.requests)

    first = await seeds(1)
    assert len(set(first)) == 4 and all(0 <= seed < 2**63 for seed in first)
    assert await seeds(1) == first
    assert not set(await seeds(2)) & set(first)


def test_seed_depends_on_step_phase_sample_and_turn_not_on_process():
    def seed(step=3, phase: TrainingPhase = "train", repetition=0, turn=0):
        return compute_request_seed(42, BatchMetadata(step, phase), TrajectoryID("17", repetition), turn)

    later = BatchMetadata(9, "train", sampling_seed=3, weight_version=8)
    assert compute_request_seed(42, later, TrajectoryID("17", 0), 0) == seed(), "neither the step nor the version seeds"
    assert len({seed(), seed(step=4), seed(phase="eval"), seed(repetition=1), seed(turn=1)}) == 5
    code = (
        "from skyrl_train.generators.sampling import compute_episode_seed, compute_request_seed as r\n"
        "from skyrl_train.generators.base import BatchMetadata as B, TrajectoryID as T\n"
        "print(r(42, B(3, 'train'), T('17', 0), 0))"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(elsewhere.stdout) == seed()


async def test_engine_crash_ends_batch_instead_of_failing_rollout(game, say, characters, environments):
    scripts = [[WorkerError("engine 0 died")], [say("b")]]
    with pytest.raises(WorkerError, match="engine 0 died"):
        await game(characters, scripts, [bad(), GOOD]).play()
    assert "bad" in environments.closed


class Lottery(BaseTextEnv):
    """Environment whose reward is given by its seed, and that ends by a limit."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def init(self, prompt, seed=None):
        self.seed = seed
        return prompt, {}

    def step(self, action):
        return {"observations": [], "reward": float(self.seed % 997), "done": True, "truncated": True, "metadata": {}}


async def test_samples_share_episode_seed_within_prompt_only(game, say, characters):
    """Their rewards are compared with each other, so they must have been given the same task."""
    with register_environments(lottery=Lottery):
        first = await game(characters, [[say("a")], [say("b")]], [{}, {}], env_class="lottery").play()
        again = await game(characters, [[say("x")], [say("y")]], [{}, {}], env_class="lottery").play()
    rewards = [sum(each) for each in first.output["rewards"]]
    assert rewards[0] != rewards[1]
    assert rewards == [sum(each) for each in again.output["rewards"]]
    assert first.output["rollout_metrics"]["environment/truncated"] == 1.0

    def seed(sample: int, prompt: str = "0") -> int:
        return compute_episode_seed(1, None, TrajectoryID(prompt, sample))

    assert seed(0) == seed(1) != seed(0, prompt="1")


async def test_returned_thread_is_reused_and_hanging_thread_is_not():
    threads, released = DaemonThreads(max_workers=2, timeout_seconds=0.1), threading.Event()
    first = await threads.call(threading.get_ident)
    assert await threads.call(threading.get_ident) == first
    held = []
    with pytest.raises(DeadlineExceeded):
        await threads.call(lambda: held.append(threading.get_ident()) or released.wait(10))
    others = {await threads.call(threading.get_ident) for _ in range(3)}
    released.set()
    assert held[0] not in others


async def test_idle_thread_keeps_no_references_to_calls():
    class Environment:
        pass

    threads = DaemonThreads(max_workers=2, timeout_seconds=5)
    alive = [weakref.ref(each) for each in await asyncio.gather(*(threads.call(Environment) for _ in range(6)))]
    await threads.call(int)
    gc.collect()
    assert [each() for each in alive] == [None] * 6


async def test_lone_surrogate_in_observation_is_replaced(game, say, characters):
    extras = [{"steps": [{"says": "cut \ud83d"}, {"reward": 1.0}]}]
    played = await game(characters, [[say("a"), say("b")]], extras).play()
    assert played.output["failures"] == [None]


@pytest.mark.parametrize("processor_time, num_warnings", [(lambda: 0.0, 1), (time.monotonic, 0)], ids=["idle", "busy"])
async def test_long_wait_for_threads_warns_in_idle_process(log, monkeypatch, processor_time, num_warnings):
    monkeypatch.setattr("skyrl_train.generators.environment.LONG_WAIT_SECONDS", 0.2)
    monkeypatch.setattr("skyrl_train.generators.environment.time.process_time", processor_time)
    threads = DaemonThreads(max_workers=1, timeout_seconds=5)
    await asyncio.gather(*(threads.call(time.sleep, 0.1) for _ in range(4)))
    assert sum("max_env_workers" in line for line in log) == num_warnings
