"""Causes of a hang from the evidence of a run, most likely first. A pure function.

Waits form a graph: a wait contains others of its process (`parent`), and leads to those it is for (`on`). The graph is
    followed from the trainer to its ends: a process that does not run, something outside the run (a lock, a file, an
    address), work that does not end, or an idle process. An end is a cause; the waits on the path to it are its
    effects.
"""

import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from skyrl_gym.waits import NEXT_CALL, PEERS, Wait
from skyrl_inspect.explain.evidence import GONE, ProcessEvidence, Situation
from skyrl_train.utils.explanations import SCHEDULER, TRAINER

GIVEN_UP_SECONDS = 6.0
"""A wait that ended by an exception so shortly ago is one whose deadline has expired, which the exception tells of."""

_EXPIRED_SHARE = 0.9
_MOST_BRANCHES, _MOST_HOLDERS = 64, 8  # of a wait, and of something that many wait for
_NUMBER = re.compile(r"#(\d+)")
_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages", "<")


class Kind(IntEnum):
    """Kinds of cause, the surest first."""

    NOT_RUNNING = 0
    OUTSIDE = 1
    LEFT_OUT = 2
    CYCLE = 3
    DIFFERENT = 4
    BUSY = 5
    IDLE = 6


@dataclass(frozen=True)
class HangCause:
    """A cause, and whom it stops."""

    kind: Kind
    cause: str
    """Process or resource, and its state, in a sentence without a full stop."""
    remedy: str = ""
    seconds: float = 0.0
    """Age of the longest wait that ends here."""
    is_expired: bool = False
    """Whether a deadline of a wait on the way has passed."""
    chain: tuple[str, ...] = ()
    """Waits that end here, the nearest first."""
    num_chains: int = 1

    @property
    def rank(self) -> tuple[bool, bool, int, float]:
        return self.kind is not Kind.NOT_RUNNING, not self.is_expired, int(self.kind), -self.seconds


def find_causes(situation: Situation) -> list[HangCause]:
    """Return the causes, most likely first."""
    graph = _Graph(situation)
    found: dict[str, HangCause] = {}
    for finding in graph.find_causes():
        before = found.get(finding.cause)
        if before is None:
            found[finding.cause] = finding
            continue
        longer = max(before, finding, key=lambda one: (one.is_expired, len(one.chain), one.seconds))
        found[finding.cause] = replace(
            longer, num_chains=before.num_chains + 1, seconds=max(before.seconds, finding.seconds)
        )
    return sorted(found.values(), key=lambda finding: finding.rank)


@dataclass(frozen=True)
class _Link:
    """Wait on the way, in its process."""

    process: ProcessEvidence
    wait: Wait


class _Graph:
    def __init__(self, situation: Situation):
        self._now = situation.now
        self._situation = situation
        newest: dict[str, ProcessEvidence] = {}
        for process in sorted(situation.processes, key=lambda each: (each.state != GONE, each.began)):
            newest[process.role] = process  # one that was started again counts in place of the one before
        self._processes = newest
        self._open = {
            role: [wait for wait in process.waits if self._is_present(wait)] for role, process in newest.items()
        }
        self._visited: set[tuple[str, int]] = set()

    def find_causes(self) -> Iterator[HangCause]:
        trainer = self._processes.get(TRAINER)
        roots = [TRAINER] if trainer is not None else []
        for role in [*roots, *(role for role in self._processes if role != TRAINER)]:
            for wait in self._tops(role):
                # What others lead to has been seen; a rank that waits for calls stops nobody.
                if wait.what != NEXT_CALL and (role, wait.id) not in self._visited:
                    yield from self._follow(_Link(self._processes[role], wait), ())
        for process in self._processes.values():
            yield from self._not_running(process, ())

    # ---- the graph

    def _is_present(self, wait: Wait) -> bool:
        return not wait.ended or (wait.was_given_up and self._now - wait.ended < GIVEN_UP_SECONDS)

    def _inside(self, link: _Link) -> list[Wait]:
        return [wait for wait in self._open[link.process.role] if wait.parent == link.wait.id]

    def _tops(self, role: str) -> list[Wait]:
        present = self._open[role]
        ids = {wait.id for wait in present}
        return [wait for wait in present if wait.parent not in ids]

    def _get_waits(self, name: str) -> list[_Link]:
        """Return the outermost waits of one that waits, the oldest first, wherever it lives."""
        links = []
        for role, present in self._open.items():
            by_id = {wait.id: wait for wait in present}
            for wait in present:
                outer = by_id.get(wait.parent)
                if wait.who == name and (outer is None or outer.who != name):
                    links.append(_Link(self._processes[role], wait))
        return sorted(links, key=lambda link: link.wait.began)

    def _get_innermost(self, role: str) -> list[Wait]:
        parents = {wait.parent for wait in self._open[role]}
        return [wait for wait in self._open[role] if wait.id not in parents]

    # ---- following a wait

    def _follow(self, link: _Link, chain: tuple[_Link, ...]) -> Iterator[HangCause]:
        """Yield the causes that a wait ends at. Args: `chain`, the waits before it, the nearest first."""
        if link in chain:
            yield self._cycle(link, chain)
            return
        self._visited.add((link.process.role, link.wait.id))
        bad = list(self._not_running(link.process, chain))
        if bad:
            yield from bad
            return
        here = (link, *chain)
        inside = self._inside(link)[:_MOST_BRANCHES]
        if inside:
            for wait in inside:
                yield from self._follow(_Link(link.process, wait), here)
        elif link.wait.on == PEERS:
            yield from self._peers(link, here)
        elif link.wait.what == NEXT_CALL:
            yield self._idle(link.process.role, here)
        elif not link.wait.on:
            yield self._busy(link, here)
        else:
            is_path = link.wait.on.startswith(("file ", "lock "))
            for name in [link.wait.on] if is_path else link.wait.on.split(", "):
                yield from self._target(name, here)

    def _target(self, name: str, chain: tuple[_Link, ...]) -> Iterator[HangCause]:
        links = self._get_waits(name)
        process = self._processes.get(name)
        bad = [] if process is None else list(self._not_running(process, chain))
        if bad:
            yield from bad
        elif links:
            working = [link for link in links if link.wait.what != NEXT_CALL] or links[:1]
            for link in working[:_MOST_HOLDERS]:
                yield from self._follow(link, chain)
        elif process is not None:
            yield self._idle(name, chain)
        else:
            yield self._outside(name, chain)

    def _peers(self, link: _Link, chain: tuple[_Link, ...]) -> Iterator[HangCause]:
        """Yield why a collective does not end: peers that do not run, or are not in it."""
        own = link.process.role
        group = own.rpartition(" ")[0]
        found: list[HangCause] = []
        others: list[_Link] = []
        for role, process in self._processes.items():
            if role == own or role.rpartition(" ")[0] != group:
                continue
            if bad := list(self._not_running(process, chain)):
                found += bad
                continue
            inner = [wait for wait in self._get_innermost(role) if wait.who == role]
            if not inner or all(wait.what == NEXT_CALL for wait in inner):
                found.append(self._find_skipped_collective(process, link, chain))
                continue
            # Libraries run a backward in threads of their own: its collectives are not inside of the call.
            for wait in [wait for wait in inner if wait.on == PEERS] or inner:
                if wait.on != PEERS:
                    found += self._follow(_Link(process, wait), chain)
                elif wait.what != link.wait.what:
                    others.append(_Link(process, wait))
        yield from found
        if found:
            return
        if others:
            where = "; ".join(sorted(self._collective(each) for each in [link, *others]))
            yield self._finding(
                Kind.DIFFERENT,
                f"ranks of {group} are in different collectives: {where}",
                chain,
                "one of them skipped a collective or started one too many: compare their stacks",
            )
        elif own == min(role for role in self._processes if role.rpartition(" ")[0] == group):
            yield self._finding(
                Kind.BUSY,
                f"every rank of {group} on this machine is in {link.wait.what}: the network between them, or a rank "
                "that does not report",
                chain,
            )

    # ---- causes

    def _not_running(self, process: ProcessEvidence, chain: tuple[_Link, ...]) -> Iterator[HangCause]:
        name = f"{process.role} (pid {process.pid})"
        if process.state in ("T", "t"):
            remedy = f"kill -CONT {process.pid} continues it"
            yield self._finding(
                Kind.NOT_RUNNING, f"{name} is stopped, for example by SIGSTOP or a debugger", chain, remedy, process
            )
        elif process.state in ("Z", GONE):
            last = f"; its last wait: {_describe_wait(process.waits[-1])}" if process.waits else ""
            remedy = f"see the end of its log, {process.log}, and the kernel's log" if process.log else ""
            yield self._finding(Kind.NOT_RUNNING, f"{name} is dead{last}", chain, remedy, process)
        elif process.state == "D":
            work = self._get_innermost(process.role)
            what = f" in {_describe_wait(work[-1])}" if work else ""
            yield self._finding(
                Kind.NOT_RUNNING,
                f"{name} is blocked in the kernel, waiting for a disk or a device{what}",
                chain,
                "check the file system",
                process,
            )
        for child in process.children:
            if child.state == "T":
                yield self._finding(
                    Kind.NOT_RUNNING,
                    f"a child of {name} is stopped: pid {child.pid}, {child.name}",
                    chain,
                    f"kill -CONT {child.pid} continues it",
                    process,
                )

    def _outside(self, name: str, chain: tuple[_Link, ...]) -> HangCause:
        kind, _, path = name.partition(" ")
        if kind == "lock" and path:
            holders = ", ".join(self._situation.lock_holders.get(path, [])) or "a process on another machine"
            return self._finding(
                Kind.OUTSIDE, f"{holders} holds the lock {path}", chain, "terminate it, or let it finish"
            )
        if kind == "file" and path:
            return self._finding(
                Kind.OUTSIDE,
                f"{chain[0].wait.who} (pid {chain[0].process.pid}) cannot finish writing {path}",
                chain,
                "the disk or object store is stalled, or the file is a pipe without a reader",
            )
        if "://" in name:
            return self._finding(Kind.OUTSIDE, f"no reply from {name}", chain, "check that server and its log")
        ray = self._ray()
        if name == SCHEDULER:
            return self._finding(Kind.OUTSIDE, f"{SCHEDULER} has no resources for {chain[0].wait.what}{ray}", chain)
        return self._finding(
            Kind.OUTSIDE, f"{name} has not started, or reports no waits{ray}", chain, "check its log, if it exists"
        )

    def _ray(self) -> str:
        state = self._situation.ray
        if not state or "free" not in state:
            return ""
        waiting = ", ".join(map(str, state.get("waiting", []))) or "nothing"
        return f" (waiting for resources in Ray: {waiting}; free: {state['free']} of {state['total']})"

    def _busy(self, link: _Link, chain: tuple[_Link, ...]) -> HangCause:
        # Work that somebody else does for a wait is named by that one: a thread for a step of an environment.
        present = self._open[link.process.role]
        named = next((wait for wait in present if wait.id == link.wait.parent and not wait.on), link.wait)
        named = link.wait if named.who == link.wait.who else named
        who = f"{named.who} (pid {link.process.pid})"
        counts = self._count_collectives(link.process.role)
        return self._finding(Kind.BUSY, f"{who} does not finish {named.what}{self._format_frame(link)}{counts}", chain)

    def _count_collectives(self, role: str) -> str:
        """Return how many collectives each rank of a group has begun, where the numbers differ: on CUDA none waits in
        one."""
        group = role.rpartition(" ")[0]
        ranks = [process for name, process in self._processes.items() if group and name.rpartition(" ")[0] == group]
        begun = {process.role: _num_collectives(process) for process in ranks}
        if len(set(begun.values())) < 2:
            return ""
        return f" (collectives begun: {', '.join(f'{name}: {number}' for name, number in begun.items())})"

    def _idle(self, name: str, chain: tuple[_Link, ...]) -> HangCause:
        process = self._processes.get(name)
        who = name if process is None else f"{name} (pid {process.pid})"
        return self._finding(Kind.IDLE, f"{who} is idle: it waits for calls", chain)

    def _find_skipped_collective(self, peer: ProcessEvidence, link: _Link, chain: tuple[_Link, ...]) -> HangCause:
        last = _num_collectives(peer)
        return self._finding(
            Kind.LEFT_OUT,
            f"{peer.role} (pid {peer.pid}) skipped {link.wait.what}: it has started {last} collectives and waits for "
            "the next call",
            chain,
            "all ranks must call the same collectives: look for an early return, or a condition that "
            "differs between ranks",
            peer,
        )

    def _cycle(self, link: _Link, chain: tuple[_Link, ...]) -> HangCause:
        members = [*reversed(chain[: chain.index(link) + 1])]
        where = ", which blocks: ".join(f"{each.wait.who} in {_describe_wait(each.wait)}" for each in members)
        return self._finding(Kind.CYCLE, f"deadlock: {where}", chain)

    def _collective(self, link: _Link) -> str:
        return f"{link.process.role} (pid {link.process.pid}) in {link.wait.what}{self._format_frame(link)}"

    def _format_frame(self, link: _Link) -> str:
        frame = innermost_own_frame(link.process.stacks.get(link.wait.thread, ()))
        return f", at {frame}" if frame else ""

    def _finding(
        self,
        kind: Kind,
        cause: str,
        chain: Sequence[_Link],
        remedy: str = "",
        process: ProcessEvidence | None = None,
    ) -> HangCause:
        waits = [link.wait for link in chain]
        if process is not None:
            waits += self._open.get(process.role, []) if process.role in self._processes else []
        return HangCause(
            kind,
            cause,
            remedy,
            seconds=max((self._now - wait.began for wait in waits), default=0.0),
            is_expired=any(
                wait.deadline and self._now - wait.began >= _EXPIRED_SHARE * wait.deadline
                for wait in (link.wait for link in chain)
            ),
            chain=tuple(self._line(link) for link in chain),
        )

    def _line(self, link: _Link) -> str:
        wait = link.wait
        limit = f" of {wait.deadline:g} s" if wait.deadline else " s"
        return f"{wait.who} (pid {link.process.pid}): {_describe_wait(wait)}, for {self._now - wait.began:.1f}{limit}"


def _describe_wait(wait: Wait) -> str:
    if not wait.on:
        return wait.what
    return f"{wait.what}, waiting for {wait.on}"


def _num_collectives(process: ProcessEvidence) -> int:
    found = [_NUMBER.search(wait.what) for wait in process.waits if wait.on == PEERS]
    return max((int(match[1]) for match in found if match is not None), default=0)


def innermost_own_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame that is not of a library, the innermost one if all are."""
    own = (frame for frame in frames if not any(name in frame for name in _LIBRARIES))
    return next(own, frames[0] if frames else "").removeprefix("File ")
