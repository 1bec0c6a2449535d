"""Faulty weight updates: each is detected and named, and no engine continues with a partial update."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from skyrl_train.errors import SkyRLError, WeightSyncError
from skyrl_train.weight_sync.base import WeightUpdateRequest
from skyrl_train_testing.engine_conformance.reference import Weights
from skyrl_train_testing.engine_conformance.registry import ConformanceError, check, check_close, check_raises, expect
from skyrl_train_testing.engine_conformance.subject import EngineUnderTest
from skyrl_train_testing.engine_conformance.transfer import Tamper
from skyrl_train_testing.engine_conformance.weights import check_weights

_SILENCE_SECONDS = 3.0


async def _check_named(
    subject: EngineUnderTest, tamper: Tamper, *, what: str, names: Sequence[str] = (), lands: bool = False
) -> None:
    """The sync raises WeightSyncError with one of `names`; the engine gives old answers or none; a whole update heals.

    Args:
        lands: only the sender can see that anything is wrong. Its error stops a run; until then the engine answers with
            what it was given.
    """
    weights = subject.reference.changed(seed=30)
    old_version = subject.version
    sending = subject.set_weights(weights, way=_way(subject), pause=None, tamper=tamper)
    await check_raises(WeightSyncError, sending, f"an update with {what}", names=names)
    if not lands:
        await _check_old_responses_or_none(subject, old_version, weights, what)
    await subject.set_weights(weights, way=_way(subject), pause=None)
    await check_weights(subject, weights, f"a whole update after one with {what}")
    await subject.load_original_weights()


def _way(subject: EngineUnderTest) -> tuple:
    """Choose a transport that does not wait for a bucket that was lost (a broadcast does)."""
    ways = [way for way in subject.ways if way[0] != "broadcast" and way[1] == "full"]
    return (ways or list(subject.ways))[0]


async def _check_old_responses_or_none(subject: EngineUnderTest, old_version: int, weights: Weights, what: str) -> None:
    """Check that an engine after a failed update responds as before, raises an error or waits."""
    prompt = subject.prompt(9, seed=1)
    asked = subject.begin([prompt], max_tokens=8, ignore_eos=True)
    await asyncio.wait([asked], timeout=_SILENCE_SECONDS)
    if not asked.done():
        return  # it waits for a whole update
    try:
        output = asked.result()
    except ConformanceError:
        raise
    except (SkyRLError, RuntimeError):
        return
    [ids], versions = output["response_ids"], set(output["weight_versions"][0])
    expect(
        versions == {old_version}, f"after {what} tokens have weight versions {versions}; it was {old_version} before"
    )
    with subject.reference.holding(weights):
        others = {"those of the new weights": subject.reference.log_probs(prompt, ids)}
    log_probs = (output["response_logprobs"] or [[]])[0]
    expected = subject.reference.log_probs(prompt, ids)
    check_close(f"old version {old_version} after {what}", log_probs, expected, subject.tolerance, others)


@check("weight_update")
async def check_lost_bucket(subject: EngineUnderTest) -> None:
    """An update without one of its buckets, the first, a middle or the last one, raises WeightSyncError."""
    for lost in (0, 2):
        await _check_named(
            subject,
            lambda request, lost=lost: [] if request.index == lost else [request],
            what="a lost bucket",
        )
    last = next(reversed(subject.reference.original))
    lost_names: list[str] = []

    def without_the_last(request: WeightUpdateRequest) -> Sequence[WeightUpdateRequest]:
        if last not in request.names:
            return [request]
        lost_names[:] = request.names
        return []

    await _check_named(subject, without_the_last, names=lost_names, what="its last bucket lost")


@check("weight_update")
async def check_repeated_bucket(subject: EngineUnderTest) -> None:
    """A bucket that is delivered twice raises WeightSyncError."""
    await _check_named(subject, lambda request: [request] * (2 if request.index == 1 else 1), what="a bucket twice")


@check("weight_update")
async def check_unknown_tensor(subject: EngineUnderTest) -> None:
    """A tensor that the engine's model does not have raises WeightSyncError, which names it."""

    def renamed(request: WeightUpdateRequest) -> Sequence[WeightUpdateRequest]:
        return [replace(request, names=["model.typo.weight", *request.names[1:]]) if request.index == 1 else request]

    await _check_named(subject, renamed, names=["model.typo.weight"], what="an unknown name")


@check("weight_update")
async def check_wrong_shape(subject: EngineUnderTest) -> None:
    """A tensor of another shape raises WeightSyncError, which names it."""
    name = next(n for n, value in subject.reference.original.items() if value.dim() == 2 and len(set(value.shape)) == 2)

    def reshaped(request: WeightUpdateRequest) -> Sequence[WeightUpdateRequest]:
        shapes = [
            shape[::-1] if own == name else shape for own, shape in zip(request.names, request.shapes, strict=True)
        ]
        return [replace(request, shapes=shapes)]

    await _check_named(subject, reshaped, names=[name], what="a transposed shape")


@check("weight_update")
async def check_swapped_tensors(subject: EngineUnderTest) -> None:
    """Two tensors of one shape that arrive under each other's name differ in the report, which names them."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for own, value in subject.reference.original.items():
        shapes.setdefault(tuple(value.shape), []).append(own)
    one, other = next(names[:2] for names in shapes.values() if len(names) > 1)
    swap = {one: other, other: one}

    def swapped(request: WeightUpdateRequest) -> Sequence[WeightUpdateRequest]:
        return [replace(request, names=[swap.get(own, own) for own in request.names])]

    await _check_named(subject, swapped, names=[one, other], what="two tensors swapped", lands=True)


@check("weight_update")
async def check_other_precision(subject: EngineUnderTest) -> None:
    """Bytes that are announced as another dtype raise WeightSyncError or differ in the report."""
    other = "int32" if subject.reference.dtype.itemsize == 4 else "int16"
    last = next(reversed(subject.reference.original))

    def retyped(request: WeightUpdateRequest) -> Sequence[WeightUpdateRequest]:
        dtypes = [other if own == last else kind for own, kind in zip(request.names, request.dtypes, strict=True)]
        return [replace(request, dtypes=dtypes)]

    await _check_named(subject, retyped, names=[last], what="another dtype", lands=True)


@check("weight_update")
async def check_weights_without_connection(subject: EngineUnderTest) -> None:
    """Finishing an update that was not started raises WeightSyncError, and the engine does not change."""
    await subject.set_weights(subject.reference.original)
    ending = subject.in_time(subject.engine.finish_weight_update(subject.version + 1))
    await check_raises(WeightSyncError, ending, "finish_weight_update without an update")
    told = await subject.in_time(subject.engine.weight_version())
    expect(told == subject.version, f"the version went from {subject.version} to {told} without an update")
    await check_weights(subject, None, "after an end without an update")
