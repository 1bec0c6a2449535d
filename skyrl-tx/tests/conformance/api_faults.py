"""Faults of the API process; see `faults`."""

import dataclasses
import itertools
from typing import Any

from faults import API, around, fault

from tx.errors import RequestError

TENANTS = ("first", "second")
"""Of the server that the test starts."""


# ---- order, repetition


@fault(API, "ordering.")
def order_of_arrival() -> None:
    """requests are done as they come, whatever their seq"""
    from tx.tinker.service.sequencer import Sequencer

    def offer(original, self, seq, item, now):
        seen = self.__dict__.setdefault("seen", set())
        if seq in seen:
            raise ValueError(f"seq {seq} was offered before")
        seen.add(seq)
        self.next_seq = max(self.next_seq, seq + 1)
        return [] if item is None else [item]

    around(Sequencer, "offer", offer)
    around(Sequencer, "knows", lambda knows, self, seq: seq in self.__dict__.get("seen", set()))


@fault(API, "ordering.")
def repetitions_are_done_again() -> None:
    """a request that is sent again is another request"""
    from tx.tinker.service.intake import RequestIntake

    async def submit(original, self, tenant, command, request):
        run = self._state.run(tenant, request.model_id)
        if not run.sequence.knows(request.seq_id):
            return await original(self, tenant, command, request)
        following = {"seq_id": run.sequence.next_seq}
        again = (
            dataclasses.replace(request, **following)
            if dataclasses.is_dataclass(request)
            else request.model_copy(update=following)
        )
        return await original(self, tenant, command, again)

    around(RequestIntake, "submit", submit)


@fault(API, "ordering.")
def repeated_samples_are_drawn_again() -> None:
    """a sample that is sent again is another sample"""
    from tx.tinker.service.sampling import Samplers

    fresh = itertools.count(1_000_000)

    async def asample(original, self, tenant, request):
        if request.seq_id is not None:
            request = request.model_copy(update={"seq_id": next(fresh)})
        return await original(self, tenant, request)

    around(Samplers, "asample", asample)


@fault(API, "ordering.")
def refused_requests_leave_a_gap() -> None:
    """a body that is refused does not use up its seq"""
    from tx.tinker.service.intake import RequestIntake

    async def refuse(*_: Any) -> None:
        return None

    around(RequestIntake, "refuse", refuse)


@fault(API, "life_cycle.")
def results_are_read_once() -> None:
    """a result that was given out is forgotten"""
    from tx.tinker.service.futures import Futures

    async def retrieve(original, self, tenant, request_id, timeout):
        if request_id in self.delivered:
            raise RequestError(f"request_id {request_id!r} is not known", 404)
        return await original(self, tenant, request_id, timeout)

    around(Futures, "retrieve", retrieve)


# ---- tenants


def _of_everybody(name: str, **things: str) -> None:
    """A lookup of `Live` does not ask whose it is."""
    from tx.tinker.service.state import ServerState

    def look(original, self, tenant, key):
        thing = getattr(self, things["among"]).get(key)
        return original(self, thing.tenant if thing else tenant, key)

    around(ServerState, name, look)


@fault(API, "tenants.")
def models_are_everybodys() -> None:
    """a model may be used by every tenant"""
    _of_everybody("run", among="runs")


@fault(API, "tenants.")
def sessions_are_everybodys() -> None:
    """a session may be used by every tenant"""
    _of_everybody("session", among="sessions")


@fault(API, "tenants.")
def samplers_are_everybodys() -> None:
    """a sampler may be used by every tenant"""
    _of_everybody("sampler", among="samplers")


@fault(API, "tenants.")
def results_are_everybodys() -> None:
    """a result may be fetched by every tenant who knows its id"""
    from tx.tinker.service.futures import Futures

    async def retrieve(original, self, tenant, request_id, timeout):
        for each in TENANTS:
            try:
                return await original(self, each, request_id, timeout)
            except RequestError as error:
                refusal = error
        raise refusal

    around(Futures, "retrieve", retrieve)


def _checkpoints() -> Any:
    from tx.tinker.service.checkpoints import Checkpoints

    return Checkpoints


@fault(API, "tenants.")
def checkpoints_are_everybodys() -> None:
    """a checkpoint may be loaded and fetched by every tenant"""

    async def source(original, self, tenant, path, **options):
        for each in TENANTS:
            try:
                return await original(self, each, path, **options)
            except RequestError as error:
                refusal = error
        raise refusal

    around(_checkpoints(), "source", source)


@fault(API, "tenants.")
def checkpoints_are_changed_by_everybody() -> None:
    """a checkpoint may be deleted and published by every tenant"""

    async def change(original, self, tenant, *args):
        for each in TENANTS:
            try:
                return await original(self, each, *args)
            except RequestError as error:
                refusal = error
        raise refusal

    around(_checkpoints(), "_change", change)


@fault(API, "tenants.")
def lists_of_checkpoints_are_everybodys() -> None:
    """the list of a tenant's checkpoints has those of all"""

    async def of_tenant(original, self, tenant, limit, offset):
        pages = [await original(self, each, limit, offset) for each in TENANTS]
        return pages[0] | {"checkpoints": [one for page in pages for one in page["checkpoints"]]}

    around(_checkpoints(), "of_tenant", of_tenant)


@fault(API, "tenants.")
def lists_of_sessions_are_everybodys() -> None:
    """the list of a tenant's sessions has those of all"""
    from tx.tinker.service.sessions import Sessions

    async def listed(original, self, tenant, limit, offset):
        pages = [await original(self, each, limit, offset) for each in TENANTS]
        return {"sessions": [one for page in pages for one in page["sessions"]]}

    around(Sessions, "list", listed)


@fault(API, "tenants.")
def unknown_keys_are_let_in() -> None:
    """whoever brings no key that is known is the first tenant"""
    from tx.tinker.http import auth

    around(auth, "key_of", lambda key_of, headers: key_of(headers) or "nothing")
    first = auth.LOCAL._replace(tenant=TENANTS[0])
    around(auth.ApiKeys, "holder_of", lambda holder_of, self, key: holder_of(self, key) or first)


@fault(API, "tenants.")
def announced_bodies_take_room() -> None:
    """what a body announces counts as if it were there, and when the room is taken nobody's request gets in"""
    from tx.tinker.http.bodies import Share

    def check(original, self, num_bytes):
        if self.intake.num_bytes.total() + num_bytes > self.intake.max_bytes:
            self.intake.refuse(self.tenant, "requests are being read already")
        self.intake.num_bytes[self.tenant] += num_bytes - self.num_bytes
        self.num_bytes = num_bytes

    around(Share, "check", check)
    around(Share, "hold", lambda hold, self, num_bytes: None)


# ---- checkpoints, sessions


def _effects(**values: Any) -> None:
    """Saves become other checkpoints than was asked for."""
    from tx.tinker import commands

    around(commands, "SaveEffect", lambda effect, **given: effect(**given | values))


@fault(API, "listings.")
def ttl_is_ignored() -> None:
    """a time to live given with a save has no effect"""
    _effects(ttl_seconds=None)


@fault(API, "listings.")
def metadata_is_lost() -> None:
    """metadata given with a save is forgotten"""
    _effects(user_metadata=None)


@fault(API, "checkpoints.")
def names_are_taken_silently() -> None:
    """a checkpoint of the same name is replaced though overwrite was not asked for"""
    _effects(overwrite=True)


@fault(API, "listings.")
def deletion_does_nothing() -> None:
    """a deleted checkpoint stays"""

    async def delete(*_: Any) -> None:
        return None

    around(_checkpoints(), "delete", delete)


@fault(API, "life_cycle.")
def ended_sessions_beat() -> None:
    """a heartbeat of a session that ended, or never was, is welcome"""
    from tx.tinker.service.sessions import Sessions

    async def heartbeat(*_: Any) -> dict[str, Any]:
        return {"type": "session_heartbeat"}

    around(Sessions, "heartbeat", heartbeat)


@fault(API, "life_cycle.")
def refused_heartbeats_end_sessions() -> None:
    """a heartbeat that is refused ends the sessions of its tenant"""
    import asyncio

    from tx.tinker.service.sessions import Sessions

    ending = set()

    def keep(original, self, tenant):
        for session in [session for session in self._state.sessions.values() if session.tenant == tenant]:
            ending.add(asyncio.ensure_future(self.end(session, "expired")))

    around(Sessions, "keep_all", keep)


# ---- refusals


@fault(API, "life_cycle.", "listings.")
def not_found_is_an_error_of_the_server() -> None:
    """404 is answered as 500"""
    from tx.tinker.http import problems

    async def refused(original, request, error):
        answer = await original(request, error)
        answer.status_code = 500 if answer.status_code == 404 else answer.status_code
        return answer

    around(problems, "_refused", refused)


@fault(API, "refusals.")
def data_is_not_checked() -> None:
    """a pass is accepted whatever its tokens, and fails later"""
    from tx.tinker import commands

    around(commands, "check_training", lambda *_: None)


@fault(API, "refusals.")
def refusals_say_nothing() -> None:
    """a refusal has a status, and no reason"""
    from tx.tinker.http import problems

    around(problems, "problem", lambda problem, status, text, *more: problem(status, "bad request", *more))
