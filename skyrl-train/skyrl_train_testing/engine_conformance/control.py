"""Aborts, pauses, sleep and health, with answers under way."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from skyrl_train.inference_engines.base import InferenceEngineOutput
from skyrl_train_testing.engine_conformance.answers import check_form, check_reference_log_probs
from skyrl_train_testing.engine_conformance.registry import ConformanceError, check, check_raises, expect
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest

_HEALTH_SECONDS = 10.0
_NUM_TRIES = 32


async def start_long_requests(
    subject: EngineUnderTest, *, prompt: list[int] | None = None
) -> AsyncIterator[tuple["asyncio.Task[InferenceEngineOutput]", float]]:
    """Yield two long running responses to `prompt`, one attempt after another, and the seconds of undisturbed ones. The
    caller acts at once and stops after a successful attempt. If an attempt was before the first token or after the
    last, the next one is later or earlier, since timing varies on a busy machine.
    """
    seconds = await subject.long_seconds()
    endings: Counter[str] = Counter()
    wait = 0.3 * seconds
    for _ in range(_NUM_TRIES):
        task = subject.begin_long(prompt=prompt)
        await asyncio.sleep(wait)
        yield task, seconds
        if not task.done():
            await subject.in_time(subject.engine.abort_generation())
        if task.cancelled():
            continue
        output = await task
        num_tokens = min(len(ids) for ids in output["response_ids"])
        if num_tokens == 0:
            wait *= 1.4
        elif "abort" not in output["stop_reasons"]:
            wait *= 0.7
        endings[f"{output['stop_reasons'][0]!r} after {num_tokens} tokens"] += 1
    found = ", ".join(f"{count} by {ending}" for ending, count in endings.most_common())
    raise ConformanceError(
        f"in {_NUM_TRIES} tries no answer was caught under way; of these ended {found}; undisturbed ones take "
        f"{seconds:.2f} s"
    )


def is_part(subject: EngineUnderTest, output: InferenceEngineOutput) -> bool:
    """Check that all answers were aborted after at least one token."""
    most = subject.long_params["max_tokens"]
    return set(output["stop_reasons"]) == {"abort"} and all(0 < len(ids) < most for ids in output["response_ids"])


async def check_partial_response(subject: EngineUnderTest, output: InferenceEngineOutput) -> None:
    """Check that the tokens before an abort are the beginning of the whole answer, with its log-probs and versions."""
    prompt = subject.long_prompt
    check_form(subject, [prompt] * len(output["response_ids"]), output)
    for row, (ids, text) in enumerate(zip(output["response_ids"], output["responses"], strict=True)):
        check_reference_log_probs(subject, prompt, output, row, 1.0, f"the part of answer {row}")
        expect(bool(text) == bool(ids), f"the text of {len(ids)} tokens is {text!r}")
    if "seed" not in subject.info.unsupported:
        whole = (await subject.begin_long())["response_ids"]
        for row, ids in enumerate(output["response_ids"]):
            expect(whole[row][: len(ids)] == ids, f"answer {row} is not a beginning of what its seed gives")


async def _check_waiting(subject: EngineUnderTest, late: "asyncio.Task[InferenceEngineOutput]", mode: str) -> None:
    """A request that came while the engine is paused is answered after `resume_generation`, not before."""
    expect(not late.done(), f"a request that arrived during pause({mode!r}) was answered before resume_generation")
    await subject.in_time(subject.engine.resume_generation())
    output = await late
    expect(output["stop_reasons"] == ["length"], f"a request that waited for the resume ended by {output}")


@check()
async def check_abort(subject: EngineUnderTest) -> None:
    """`abort_generation` ends requests by `abort`, with the tokens, log-probs and versions written so far."""
    async for task, _ in start_long_requests(subject):
        await subject.in_time(subject.engine.abort_generation())
        output = await task
        if is_part(subject, output):
            await check_partial_response(subject, output)
            break


@check("pause_keep")
async def check_pause_keep_stops(subject: EngineUnderTest) -> None:
    """No token is generated between pause('keep') and `resume_generation`; running requests wait, or are aborted."""
    async for task, seconds in start_long_requests(subject):
        await subject.in_time(subject.engine.pause_generation("keep"))
        try:
            caught = not task.done()
            if caught:
                await asyncio.sleep(2 * seconds + 0.3)  # an engine that went on writing is done by now
                expect(not task.done(), "an answer was finished during pause('keep')")
                await subject.in_time(subject.engine.abort_generation())
                output = await subject.in_time(task)
                most = subject.long_params["max_tokens"]
                lengths = [len(ids) for ids in output["response_ids"]]
                expect(min(lengths) < most, f"of {most} tokens {lengths} were there after a pause: it went on writing")
        finally:
            await subject.in_time(subject.engine.resume_generation())
        if caught and is_part(subject, output):
            await check_partial_response(subject, output)
            break


@check("pause_keep")
async def check_pause_keep_changes_nothing(subject: EngineUnderTest) -> None:
    """Completions are the same with and without pause('keep') and resume; requests that arrive meanwhile wait."""
    async for task, _ in start_long_requests(subject):
        await subject.in_time(subject.engine.pause_generation("keep"))
        caught = not task.done()
        late = subject.begin([subject.prompt(4)], max_tokens=3, ignore_eos=True)
        await asyncio.sleep(0.3)
        await _check_waiting(subject, late, "keep")
        output = await task
        if caught:
            lengths = [len(ids) for ids in output["response_ids"]]
            most = subject.long_params["max_tokens"]
            expect(lengths == [most] * 2, f"kept answers must have {most} tokens; got {lengths}")
            for row in range(2):
                check_reference_log_probs(subject, subject.long_prompt, output, row, 1.0, f"kept answer {row}")
            if "seed" not in subject.info.unsupported:
                whole = await subject.begin_long()
                expect(output["response_ids"] == whole["response_ids"], "kept answers differ from undisturbed ones")
            break


@check("pause_wait")
async def check_pause_wait(subject: EngineUnderTest) -> None:
    """pause('wait') returns when running requests have ended by themselves; later ones wait for the resume."""
    async for task, _ in start_long_requests(subject):
        caught = not task.done()
        pausing = asyncio.ensure_future(subject.engine.pause_generation("wait"))
        await subject.in_time(pausing)
        await asyncio.sleep(0.05)  # the answers' own tasks run
        expect(task.done(), "pause('wait') returned while a request was running")
        late = subject.begin([subject.prompt(4)], max_tokens=3, ignore_eos=True)
        await asyncio.sleep(0.3)
        await _check_waiting(subject, late, "wait")
        if caught:
            reasons = set((await task)["stop_reasons"])
            expect(reasons == {"length"}, f"requests that pause('wait') waits for end by themselves; got {reasons}")
            break


@check()
async def check_pause_abort(subject: EngineUnderTest) -> None:
    """pause('abort') ends running requests by `abort` with what they wrote; later ones wait for the resume."""
    async for task, _ in start_long_requests(subject):
        await subject.in_time(subject.engine.pause_generation("abort"))
        output = await subject.in_time(task)
        late = subject.begin([subject.prompt(4)], max_tokens=3, ignore_eos=True)
        await asyncio.sleep(0.3)
        await _check_waiting(subject, late, "abort")
        if is_part(subject, output):
            await check_partial_response(subject, output)
            break


@check()
async def check_cancelled_caller(subject: EngineUnderTest) -> None:
    """Only the cancelled request ends: others continue, the engine can be paused and serves later requests."""
    async for task, _ in start_long_requests(subject):
        beside = subject.begin([subject.prompt(4)], max_tokens=48, ignore_eos=True)
        await asyncio.sleep(0.02)  # it is on its way
        caught = not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        reasons = (await beside)["stop_reasons"]
        expect(reasons == ["length"], f"a request beside a cancelled one ended by {reasons}")
        await subject.in_time(
            subject.engine.pause_generation("abort" if "pause_wait" in subject.info.unsupported else "wait")
        )
        await subject.in_time(subject.engine.resume_generation())
        output = await subject.generate([subject.prompt(4)], max_tokens=3, ignore_eos=True)
        expect(output["stop_reasons"] == ["length"], f"after a cancelled request: {output['stop_reasons']}")
        if caught:
            break


@check("sleep")
async def check_sleep(subject: EngineUnderTest) -> None:
    """Completions and log-probs are unchanged by sleep(1) and wake_up, also by tags."""
    prompt = subject.prompt(12, seed=6)
    params = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    before = await subject.generate([prompt], **params)
    for wakes in ([None], [["weights"], ["kv_cache"]]):
        await subject.in_time(subject.engine.sleep(1))
        for tags in wakes:
            await subject.in_time(subject.engine.wake_up(tags))
        after = await subject.generate([prompt], **params)
        expect(after["response_ids"] == before["response_ids"], f"after wake_up({wakes}) answers are others")
        check_reference_log_probs(subject, prompt, after, 0, 1.0, f"after wake_up({wakes})")


@check("sleep")
async def check_sleep_during_requests(subject: EngineUnderTest) -> None:
    """`sleep` raises an error while requests are running, and they continue."""
    async for task, _ in start_long_requests(subject):
        if task.done():
            continue
        refused = False
        try:
            await subject.in_time(subject.engine.sleep(1))
        except ConformanceError:
            raise
        except Exception:  # which one is the engine's choice
            refused = True
        else:
            await subject.in_time(subject.engine.wake_up())
        reasons = set((await task)["stop_reasons"])
        if not refused and reasons == {"length"}:
            continue  # they ended first
        expect(refused, f"sleep(1) did not raise while requests were running; they ended by {reasons}")
        expect(reasons == {"length"}, f"requests under way at a refused sleep ended by {reasons}")
        break


@check("sleep", "weight_update")
async def check_deep_sleep(subject: EngineUnderTest) -> None:
    """Log-probs equal the new weights' after sleep(2), waking the weights, a whole update and waking the cache."""
    prompt = subject.prompt(12, seed=6)
    weights = subject.reference.changed(seed=5)
    await subject.in_time(subject.engine.sleep(2))
    await subject.in_time(subject.engine.wake_up(["weights"]))
    await subject.set_weights(weights, pause=None)
    await subject.in_time(subject.engine.wake_up(["kv_cache"]))
    output = await subject.generate([prompt], max_tokens=16, ignore_eos=True)
    with subject.reference.holding(weights):
        check_reference_log_probs(subject, prompt, output, 0, 1.0, "after a deep sleep and an update")


@check()
async def check_health(subject: EngineUnderTest) -> None:
    """`check_health` returns soon and raises nothing while the engine is well, whatever it does."""
    await subject.in_time(subject.engine.check_health(), _HEALTH_SECONDS)
    async for task, _ in start_long_requests(subject):
        await subject.in_time(subject.engine.check_health(), _HEALTH_SECONDS)
        caught = not task.done()
        await subject.in_time(subject.engine.pause_generation("abort"))
        await subject.in_time(subject.engine.check_health(), _HEALTH_SECONDS)
        await subject.in_time(subject.engine.resume_generation())
        if caught:
            break


@check()
async def check_prefix_cache_reset(subject: EngineUnderTest) -> None:
    """`reset_prefix_cache` costs time, not truth: answers before and after it have the model's log-probs."""
    prompt = subject.prompt(40, seed=11)
    for what in ("before a reset", "after a reset"):
        for _ in range(2):  # the second one may use the cache
            output = await subject.generate([prompt], max_tokens=6, ignore_eos=True)
            check_reference_log_probs(subject, prompt, output, 0, 1.0, what)
        await subject.in_time(subject.engine.reset_prefix_cache())


@check()
async def check_control_arguments(subject: EngineUnderTest) -> None:
    """An unknown pause mode raises ValueError, and generation continues."""
    unknown: Any = "soon"
    await check_raises(ValueError, subject.in_time(subject.engine.pause_generation(unknown)), "pause('soon')")
    output = await subject.generate([subject.prompt(4)], max_tokens=2, ignore_eos=True)
    expect(output["stop_reasons"] == ["length"], f"afterwards: {output['stop_reasons']}")
