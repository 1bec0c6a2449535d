"""Findings about a mixture's routes: how far replay of the engine's experts closes the gap."""

from collections.abc import Sequence

from skyrl_inspect.mismatch.findings import NEGLIGIBLE, Finding, Measured, Trainer


def find_routing_differences(engines: Sequence[Measured], trainer: Trainer) -> list[Finding]:
    """Report how far replay of the engine's experts closes the gap: for each engine its worst cell, where it halves the
    gap at least."""
    found = []
    for engine in engines:
        pairs = [(cell, cell.replayed_gap(trainer.dtype, trainer.clip_low, trainer.clip_high)) for cell in engine.cells]
        measured = [(cell, gap) for cell, gap in pairs if gap is not None]
        if not measured:
            continue
        cell, after = max(measured, key=lambda pair: pair[0].mean(trainer.dtype))
        before = cell.mean(trainer.dtype)
        if before > NEGLIGIBLE and after.mean <= before / 2:
            found.append(
                f"{engine.name}, {cell.sampling.name}: {cell.differing[trainer.dtype]:.2%} of its experts are others "
                f"in the trainer; replayed, the mean difference is {after.mean:.2g} in place of {before:.2g}"
            )
    if not found:
        return []
    return [
        Finding(
            "warning",
            "routing",
            f"Engine and trainer send tokens to different experts. {'; '.join(found)}. Train with "
            "trainer.policy.routing_replay=R3.",
        )
    ]
