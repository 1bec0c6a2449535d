"""An explanation as text and as JSON."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from skyrl_gym.waits import Wait
from skyrl_inspect.explain.diagnosis import HangCause, Kind
from skyrl_inspect.explain.evidence import ELSEWHERE, GONE, ProcessEvidence, Situation

_MOST_FINDINGS = 5
_MOST_WAITS = 12
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waits for a disk", "Z": "ended", GONE: "dead"}


def as_text(run_dir: Path, situation: Situation, findings: list[HangCause], reason: str) -> str:
    """Format causes and waits for a reader, most likely cause first."""
    return "\n".join(_causes_and_waits(run_dir, situation, findings, reason)) + "\n"


def details(situation: Situation) -> str:
    """Return stacks, ends of logs, memory and the state of Ray, as text."""
    return "\n".join(_details(situation)) + "\n"


def headline(findings: list[HangCause]) -> str:
    """Return the most likely cause as a sentence."""
    return findings[0].cause if findings else "no process of the run is waiting"


def as_json(run_dir: Path, situation: Situation, findings: list[HangCause], reason: str) -> str:
    """Return everything that is known, for programs."""
    rows = [asdict(finding) | {"kind": finding.kind.name.lower()} for finding in findings]
    record = {"run": str(run_dir), "reason": reason, "cause": headline(findings), "findings": rows}
    return json.dumps(record | asdict(situation), indent=1, default=str)


def _causes_and_waits(run_dir: Path, situation: Situation, findings: list[HangCause], reason: str) -> Iterator[str]:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(situation.now))
    yield f"Who waits for whom in {run_dir}, {moment}"
    if reason:
        yield f"Requested because {reason}"
    if situation.copy_of:
        yield f"This folder is a copy of {situation.copy_of}: states of its processes are not shown."
    elif all(process.state == GONE for process in situation.processes):
        yield "No process of this run is alive: it was killed. Last waits of each process:"
    yield ""
    if not findings:
        yield "No process is waiting."
    elif not any(finding.is_expired or finding.kind <= Kind.DIFFERENT for finding in findings):
        yield "No process is stopped, and no deadline has passed. Current activities, longest first:"
    for number, finding in enumerate(findings[:_MOST_FINDINGS], start=1):
        yield f"{number}. {finding.cause}."
        if finding.remedy:
            yield f"   Fix: {finding.remedy}."
        for index, line in enumerate(finding.chain):
            yield f"   {'it blocks' if index == 0 else '    thus'} {line}"
        if finding.num_chains > 1:
            yield f"   and {finding.num_chains - 1} other waits"
    if len(findings) > _MOST_FINDINGS:
        yield f"and {len(findings) - _MOST_FINDINGS} more like these, in the JSON file next to this one"
    yield from ("", "== Processes", "")
    for process in situation.processes:
        yield from _process(process, situation.now)


def _details(situation: Situation) -> Iterator[str]:
    if situation.ray is not None:
        yield from ("== Ray", "", *(f"{name}: {value}" for name, value in situation.ray.items()), "")
    yield from ("== Memory", "", *situation.memory, "")
    yield "== Stacks, innermost call first"
    for process in situation.processes:
        yield from ("", f"-- {process.role} (pid {process.pid})")
        if process.no_stacks:
            yield f"no stacks: {process.no_stacks}"
        named = {wait.thread: _short(wait) for wait in process.waits if not wait.ended}
        for thread, frames in process.stacks.items():
            yield f"thread {thread:#x}" + (f" ({named[thread]})" if thread in named else "")
            yield from (f"  {frame}" for frame in frames)
    yield from ("", "== Ends of the logs")
    for log, process in {process.log: process for process in situation.processes if process.log}.items():
        yield from ("", f"-- {log}", process.log_end)


def _process(process: ProcessEvidence, now: float) -> Iterator[str]:
    state = f"on {process.host}, another host" if process.state == ELSEWHERE else _STATES.get(process.state, "runs")
    memory = f", {process.rss_bytes / 2**20:.0f} MiB" if process.rss_bytes else ""
    yield f"{process.role}: pid {process.pid}, {state}{memory}"
    present = [wait for wait in process.waits if not wait.ended]
    depth: dict[int, int] = {}
    for wait in present[:_MOST_WAITS]:
        depth[wait.id] = depth.get(wait.parent, 0) + 1
        yield f"{'  ' * depth[wait.id]}{_short(wait)}, for {now - wait.began:.1f} s"
    if len(present) > _MOST_WAITS:
        yield f"  and {len(present) - _MOST_WAITS} more"
    for child in process.children:
        yield f"  child {child.pid} ({_STATES.get(child.state, 'runs')}): {child.name}"
    yield ""


def _short(wait: Wait) -> str:
    return f"{wait.who}: {wait.what}" + (f", waiting for {wait.on}" if wait.on else "")
