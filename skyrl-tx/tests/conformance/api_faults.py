"""Faults of the API process; see `faults`."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from faults import API, fault, faults

from tx.errors import RequestError

TENANTS = ("first", "second")
"""Tenants of the server that the test starts."""
SERVICE = "tx.tinker.service"


async def does_nothing(*_: Any) -> None:
    return None


# ---- order, repetition

SEQUENCER = f"{SERVICE}.sequencer:Sequencer"


@fault(API, "ordering.", f"{SEQUENCER}.offer")
def order_of_arrival(offer, self, seq, item, now):
    """requests are done as they come, whatever their seq"""
    seen = self.__dict__.setdefault("seen", set())
    if seq in seen:
        raise ValueError(f"seq {seq} was already submitted")
    seen.add(seq)
    self.next_seq = max(self.next_seq, seq + 1)
    return [] if item is None else [item]


@fault(API, "ordering.", f"{SEQUENCER}.knows", name="order_of_arrival")
def _seen(knows, self, seq):
    return seq in self.__dict__.get("seen", set())


@fault(API, "ordering.", f"{SERVICE}.intake:RequestIntake.submit")
async def repetitions_are_done_again(submit, self, tenant, command, request):
    """a request that is sent again is another request"""
    run = self._state.run(tenant, request.model_id)
    if run.sequence.knows(request.seq_id):
        following = {"seq_id": run.sequence.next_seq}
        is_pass = dataclasses.is_dataclass(request)
        request = dataclasses.replace(request, **following) if is_pass else request.model_copy(update=following)
    return await submit(self, tenant, command, request)


@fault(API, "ordering.", f"{SERVICE}.repetitions:Repetitions.check")
async def reused_numbers_are_repetitions(check, self, request_id, content):
    """a seq that comes again is a repetition, whatever its content"""


_fresh = itertools.count(1_000_000)


@fault(API, "ordering.", f"{SERVICE}.sampling:Samplers.asample")
async def repeated_samples_are_drawn_again(asample, self, tenant, request):
    """a sample that is sent again is another sample"""
    if request.seq_id is not None:
        request = request.model_copy(update={"seq_id": next(_fresh)})
    return await asample(self, tenant, request)


@fault(API, "life_cycle.", f"{SERVICE}.futures:Futures.retrieve")
async def results_are_read_once(retrieve, self, tenant, request_id, timeout):
    """a result that was given out is forgotten"""
    if request_id in self.delivered:
        raise RequestError(f"request_id {request_id!r} is not known", 404)
    return await retrieve(self, tenant, request_id, timeout)


# ---- tenants


def of_everybody(among: str) -> Callable[..., Any]:
    """A lookup that does not ask whose it is."""

    def look(original, self, tenant, key):
        thing = getattr(self, among).get(key)
        return original(self, thing.tenant if thing else tenant, key)

    return look


async def as_any_tenant(original, self, tenant, *args, **options):
    for each in TENANTS:
        try:
            return await original(self, each, *args, **options)
        except RequestError as error:
            refusal = error
    raise refusal


def lists_of_all(name: str) -> Callable[..., Any]:
    async def listed(original, self, tenant, limit, offset):
        pages = [await original(self, each, limit, offset) for each in TENANTS]
        return pages[0] | {name: [one for page in pages for one in page[name]]}

    return listed


CHECKPOINTS, STATE = f"{SERVICE}.checkpoints:Checkpoints", f"{SERVICE}.state:ServerState"
faults(
    API,
    "tenants.",
    [
        ("models_are_everybodys", "a model may be used by every tenant", f"{STATE}.run", of_everybody("runs")),
        ("sessions_are_everybodys", "a session may be used by every tenant", f"{STATE}.session",
         of_everybody("sessions")),
        ("samplers_are_everybodys", "a sampler may be used by every tenant", f"{STATE}.sampler",
         of_everybody("samplers")),
        ("results_are_everybodys", "a result may be fetched by every tenant who knows its id",
         f"{SERVICE}.futures:Futures.retrieve", as_any_tenant),
        ("checkpoints_are_everybodys", "a checkpoint may be loaded and fetched by every tenant",
         f"{CHECKPOINTS}.source", as_any_tenant),
        ("checkpoints_are_changed_by_everybody", "a checkpoint may be deleted and published by every tenant",
         f"{CHECKPOINTS}._update_checkpoint", as_any_tenant),
        ("lists_of_checkpoints_are_everybodys", "the list of a tenant's checkpoints has those of all",
         f"{CHECKPOINTS}.of_tenant", lists_of_all("checkpoints")),
        ("lists_of_sessions_are_everybodys", "the list of a tenant's sessions has those of all",
         f"{SERVICE}.sessions:Sessions.list", lists_of_all("sessions")),
    ],
)  # fmt: skip


@fault(API, "tenants.", "tx.tinker.http.auth:ApiKeys.find_holder")
def unknown_keys_are_let_in(holder_of, self, key):
    """whoever brings no key that is known is the first tenant"""
    from tx.tinker.http import auth

    return holder_of(self, key) or auth.LOCAL._replace(tenant=TENANTS[0])


@fault(API, "tenants.", "tx.tinker.http.auth:extract_key", name="unknown_keys_are_let_in")
def _some_key(key_of, headers):
    return key_of(headers) or "nothing"


@fault(API, "tenants.", "tx.tinker.http.bodies:BodyReservation.check")
def announced_bodies_take_room(check, self, num_bytes):
    """announced sizes of bodies count as if the bytes had arrived, and a full budget locks every client out"""
    if self.intake.num_bytes.total() + num_bytes > self.intake.max_bytes:
        self.intake.refuse(self.tenant, "requests are being received")
    self.intake.num_bytes[self.tenant] += num_bytes - self.num_bytes
    self.num_bytes = num_bytes


@fault(API, "tenants.", "tx.tinker.http.bodies:BodyReservation.hold", name="announced_bodies_take_room")
def _hold(hold, self, num_bytes):
    return None


# ---- checkpoints, sessions, refusals


def other_save(**values: Any) -> Callable[..., Any]:
    """Saves become other checkpoints than was asked for."""
    return lambda effect, **given: effect(**given | values)


async def beats(*_: Any) -> dict[str, Any]:
    return {"type": "session_heartbeat"}


SAVE = "tx.tinker.commands:SaveEffect"
for _groups, _row in [
    ("ordering.", ("refused_requests_leave_a_gap", "a body that is refused does not use up its seq",
                   f"{SERVICE}.intake:RequestIntake.refuse", does_nothing)),
    ("listings.", ("ttl_is_ignored", "a time to live given with a save has no effect", SAVE,
                   other_save(ttl_seconds=None))),
    ("listings.", ("metadata_is_lost", "metadata given with a save is forgotten", SAVE,
                   other_save(user_metadata=None))),
    ("checkpoints.", ("names_are_taken_silently",
                      "a checkpoint of the same name is replaced though overwrite was not asked for", SAVE,
                      other_save(overwrite=True))),
    ("listings.", ("deletion_does_nothing", "a deleted checkpoint stays", f"{CHECKPOINTS}.delete", does_nothing)),
    ("life_cycle.", ("ended_sessions_beat", "a heartbeat of a session that ended, or never was, is welcome",
                     f"{SERVICE}.sessions:Sessions.heartbeat", beats)),
    ("refusals.", ("data_is_not_checked", "a pass is accepted whatever its tokens, and fails later",
                   "tx.tinker.commands:check_training", lambda *_: None)),
    ("refusals.", ("refusals_say_nothing", "a refusal has a status, and no reason",
                   "tx.tinker.http.problems:build_problem",
                   lambda problem, status, text, *more: problem(status, "bad request", *more))),
]:  # fmt: skip
    faults(API, _groups, [_row])

_ending = set()


@fault(API, "life_cycle.", f"{SERVICE}.sessions:Sessions.keep_all")
def refused_heartbeats_end_sessions(keep_all, self, tenant):
    """a heartbeat that is refused ends the sessions of its tenant"""
    for session in [session for session in self._state.sessions.values() if session.tenant == tenant]:
        _ending.add(asyncio.ensure_future(self.end(session, "expired")))


@fault(API, "life_cycle. listings.", "tx.tinker.http.problems:_handle_refused")
async def not_found_is_an_error_of_the_server(refused, request, error):
    """404 is answered as 500"""
    answer = await refused(request, error)
    answer.status_code = 500 if answer.status_code == 404 else answer.status_code
    return answer
