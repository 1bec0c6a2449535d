"""Weights that arrive while the engine lives: the versions it tells, the log-probs it gives."""

import torch

from skyrl_train.inference_engines.base import InferenceEngineOutput
from skyrl_train.weight_sync.fingerprint import fingerprints_of
from skyrl_train_testing.engine_conformance.answers import check_form, check_reference_log_probs
from skyrl_train_testing.engine_conformance.control import start_long_requests
from skyrl_train_testing.engine_conformance.reference import Weights
from skyrl_train_testing.engine_conformance.registry import check, check_close, check_refusal, expect
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest


async def check_weights(subject: EngineUnderTest, weights: Weights | None, what: str) -> None:
    """The engine computes with these weights (None: the original ones) and tells the present version."""
    told = await subject.in_time(subject.engine.weight_version())
    expect(told == subject.version, f"{what}: weight_version() is {told}, the update was version {subject.version}")
    prompts = [subject.prompt(length, seed=length) for length in (1, 30)]
    output = await subject.generate(prompts, max_tokens=16, ignore_eos=True)
    check_form(subject, prompts, output)
    found = {version for row in output["weight_versions"] for version in row}
    expect(found == {subject.version}, f"{what}: tokens have weight versions {found} in place of {subject.version}")
    with subject.reference.holding(weights):
        for row, prompt in enumerate(prompts):
            check_reference_log_probs(subject, prompt, output, row, 1.0, what)


@check("weight_update")
async def check_update(subject: EngineUnderTest) -> None:
    """Log-probs equal the new weights' after an update, by every transport that the engine supports; tokens have the
    new version, and the reported fingerprints equal the sent tensors'.
    """
    for number, way in enumerate(subject.ways):
        words = " ".join(way)
        if way[0] == "broadcast" and "broadcast" in subject.info.unsupported:
            await check_refusal(subject, "broadcast")
            continue
        for weights in (
            subject.reference.changed(seed=2 * number + 1),
            subject.reference.changed(2 * number + 2),
            None,
        ):
            sent = subject.reference.original if weights is None else weights
            report = await subject.set_weights(sent, way=way)
            expect(report.version == subject.version, f"{words}: reported version {report.version}")
            held = [(name, value.to(subject.reference.dtype)) for name, value in sent.items()]
            expected = fingerprints_of(held, subject.version, "sampled")
            wrong = sorted(name for name in expected if report.fingerprints.get(name) != expected[name])
            expect(not wrong, f"{words}: other fingerprints of {len(wrong)} tensors, such as {wrong[:1]}")
            await check_weights(subject, weights, f"after an update by {words}")


@check("weight_update")
async def check_small_updates(subject: EngineUnderTest) -> None:
    """Several updates in a row, each a small step as an optimizer makes, leave the engine with the last weights."""
    weights = dict(subject.reference.original)
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        weights = {
            name: (value + 0.01 * torch.randn(value.shape, generator=draw)).to(subject.reference.dtype).float()
            for name, value in weights.items()
        }
        await subject.set_weights(weights)
    await check_weights(subject, weights, "after four small updates")


@check("weight_update")
async def check_prefix_cache_after_update(subject: EngineUnderTest) -> None:
    """Prompts served before or during an update are recomputed with the new weights for later requests."""
    prompt = subject.prompt(min(130, subject.info.max_model_len // 2), seed=8)
    for _ in range(2):
        await subject.generate([prompt] * 2, max_tokens=4, ignore_eos=True)  # cached now, if anything ever is
    weights = subject.reference.changed(seed=7)
    async for running, _ in start_long_requests(subject, prompt=prompt):
        await subject.set_weights(weights)
        during = await subject.generate([prompt] * 2, max_tokens=8, ignore_eos=True)
        caught = not running.done()
        after = await subject.generate([prompt], max_tokens=8, ignore_eos=True)
        for output in (during, after):
            for ids, found in zip(output["response_ids"], output["response_logprobs"] or [], strict=True):
                with subject.reference.holding(weights):
                    new = subject.reference.log_probs(prompt, ids)
                others = {"those over keys of the older weights": subject.reference.over_old_keys(prompt, ids, weights)}
                check_close("a request after the update", found, new, subject.tolerance, others)
        if caught:
            break
        await subject.load_original_weights()


@check("weight_update")
async def check_update_during_responses(subject: EngineUnderTest) -> None:
    """Running requests continue at an update. Their earlier tokens keep the old version and log-probs; later ones have
    the new version and the log-probs of the new weights, over the keys of the old ones or over new keys.
    """
    pauses = (None,) if "pause_keep" in subject.info.unsupported else ("keep", None)
    weights = subject.reference.changed(seed=20)
    for pause in pauses:
        old_version = subject.version
        async for task, _ in start_long_requests(subject):
            if task.done():
                continue
            await subject.set_weights(weights, pause=pause)
            output = await subject.in_time(task)
            if _check_both_versions(subject, output, old_version, weights, f"with pause {pause}"):
                break
            await subject.load_original_weights()
            old_version = subject.version
        await subject.load_original_weights()


def _check_both_versions(
    subject: EngineUnderTest, output: InferenceEngineOutput, old: int, weights: Weights, what: str
) -> bool:
    """Check the log-probs of answers on both sides of an update. Returns: False if an answer was not under way at
    it."""
    prompt = subject.long_prompt
    check_form(subject, [prompt] * 2, output)
    most = subject.long_params["max_tokens"]
    caught = []
    for row, versions in enumerate(output["weight_versions"]):
        num_old = versions.count(old)
        expect(
            versions == [old] * num_old + [subject.version] * (len(versions) - num_old),
            f"{what}: versions of answer {row} must be {old} and then {subject.version}; got {sorted(set(versions))}",
        )
        expect(len(versions) == most, f"{what}: answer {row} ended after {len(versions)} of {most} tokens")
        caught.append(0 < num_old < most)
    if not all(caught):
        return False
    for row, versions in enumerate(output["weight_versions"]):
        ids, num_old = output["response_ids"][row], versions.count(old)
        log_probs = (output["response_logprobs"] or [])[row]
        kept = subject.reference.log_probs_across(prompt, ids, num_old, None, weights)
        with subject.reference.holding(weights):
            anew = subject.reference.log_probs(prompt, ids)
        before = subject.reference.log_probs(prompt, ids)
        check_close(
            f"{what}: tokens of answer {row} written before the update",
            log_probs[:num_old],
            before[:num_old],
            subject.tolerance,
        )
        late = log_probs[num_old:]
        gap = float((torch.tensor(late) - anew[num_old:]).abs().max())
        if gap > subject.tolerance:  # else the engine computed the keys again
            others = {"those of the old weights": before[num_old:]}
            words = f"{what}: tokens of answer {row} written after the update"
            check_close(words, late, kept[num_old:], subject.tolerance, others)
    return True
