"""Checks of sessions, runs and checkpoints: list, page, publish, expire, delete."""

import datetime

from tx_conformance.checks import check, expect, expect_close, expect_equal, expect_refused
from tx_conformance.client import Service, done
from tx_conformance.server import ServerUnderTest


def saved(server: ServerUnderTest, *names: str) -> tuple[str, list[str]]:
    """A new run with these training checkpoints; its id and their paths."""
    wire, model_id = server.wire, server.model()
    paths = [wire.result(wire.save(model_id, seq, name))["path"] for seq, name in enumerate(names, 1)]
    return model_id, paths


def checkpoint(server: ServerUnderTest, run: str, name: str, kind: str = "weights") -> dict[str, object]:
    """Return a run's checkpoint from the listing; {} if missing."""
    listed = server.wire.answer("GET", f"training_runs/{run}/checkpoints")["checkpoints"]
    return next((one for one in listed if one["checkpoint_id"] == f"{kind}/{name}"), {})


def time_of(text: str) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text)
    expect(time.tzinfo is not None, f"time without a zone: {text}")
    return time


@check
def training_run(server: ServerUnderTest) -> None:
    """a run can be looked up with its model, rank, last request and checkpoints"""
    adapter = server.adapter(rank=8)
    rest = server.service.rest()
    path = adapter.save(server.wire.fresh("run"))
    sampler_path = adapter.save_for_sampler(server.wire.fresh("run"))
    for run in (done(rest.get_training_run(adapter.id)), done(rest.get_training_run_by_tinker_path(path))):
        expect_equal(run.training_run_id, adapter.id, "training_run_id")
        expect_equal((run.base_model, run.is_lora, run.lora_rank), (server.target.model, True, 8), "model, lora, rank")
        expect(run.last_request_time is not None and run.model_owner, "no last_request_time or model_owner")
        expect_equal(run.last_checkpoint.tinker_path, path, "last_checkpoint")
        expect_equal(run.last_sampler_checkpoint.tinker_path, sampler_path, "last_sampler_checkpoint")


@check
def unknown_run(server: ServerUnderTest) -> None:
    """a run that never was is 404"""
    expect_refused(server.wire.call("GET", "training_runs/no-such-run"), statuses=(404,))
    expect_refused(server.wire.call("GET", "training_runs/no-such-run/checkpoints"), statuses=(404,))


@check
def runs_in_pages(server: ServerUnderTest) -> None:
    """runs are listed newest first, in pages that fit together"""
    made = [server.model() for _ in range(3)]
    listed = done(server.service.rest().list_training_runs(limit=3)).training_runs
    expect_equal({run.training_run_id for run in listed}, set(made), "the three newest runs")
    pages = [server.wire.answer("GET", f"training_runs?limit=1&offset={i}") for i in range(3)]
    paged = [page["training_runs"][0]["training_run_id"] for page in pages]
    expect_equal(paged, [run.training_run_id for run in listed], "runs page by page")
    cursor = pages[1]["cursor"]
    expect_equal((cursor["limit"], cursor["offset"]), (1, 1), "limit, offset")
    expect(cursor["total_count"] >= 3, f"total_count {cursor['total_count']}")
    beyond = server.wire.answer("GET", f"training_runs?limit=5&offset={cursor['total_count'] + 50}")
    expect_equal(beyond["training_runs"], [], "runs beyond the end")


@check
def bad_pages(server: ServerUnderTest) -> None:
    """a page that cannot be is refused, naming limit or offset"""
    expect_refused(server.wire.call("GET", "training_runs?limit=-1"), "limit")
    expect_refused(server.wire.call("GET", "training_runs?offset=-1"), "offset")
    expect_refused(server.wire.call("GET", "checkpoints?limit=many"), "limit")


@check
def checkpoints(server: ServerUnderTest) -> None:
    """a run's checkpoints are listed with type, path, time and size, and so they are for the user as a whole"""
    wire = server.wire
    run, paths = saved(server, "one", "two")
    sampler_path = wire.result(wire.save_for_sampler(run, 3, path="three"))["path"]
    rest = server.service.rest()
    listed = {one.tinker_path: one for one in done(rest.list_checkpoints(run)).checkpoints}
    expect_equal(set(listed), {*paths, sampler_path}, "paths")
    expect_equal(listed[paths[0]].checkpoint_type, "training", "type")
    expect_equal(listed[sampler_path].checkpoint_type, "sampler", "type of sampler weights")
    expect_equal(listed[sampler_path].checkpoint_id, "sampler_weights/three", "checkpoint_id")
    expect(all(one.size_bytes > 0 and not one.public for one in listed.values()), "no size, or public")
    mine = done(rest.list_user_checkpoints(limit=100))
    expect(set(listed) <= {one.tinker_path for one in mine.checkpoints}, "the user's list lacks them")


@check
def checkpoints_in_pages(server: ServerUnderTest) -> None:
    """a user's checkpoints come in pages without overlap"""
    saved(server, "p1", "p2", "p3")
    pages = [server.wire.answer("GET", f"checkpoints?limit=1&offset={i}")["checkpoints"] for i in range(3)]
    expect_equal(len({page[0]["tinker_path"] for page in pages}), 3, "different checkpoints on three pages")


@check
def ephemeral_weights_are_not_listed(server: ServerUnderTest) -> None:
    """weights that only serve a sampler are no checkpoints of the run"""
    run = server.model()
    server.wire.result(server.wire.save_for_sampler(run, 1, sampling_session_seq_id=1))
    listed = server.wire.answer("GET", f"training_runs/{run}/checkpoints")["checkpoints"]
    expect_equal(listed, [], "checkpoints")


@check
def delete(server: ServerUnderTest) -> None:
    """a deleted checkpoint is gone: from the list, and for loading"""
    wire = server.wire
    run, [kept, gone] = saved(server, "kept", "gone")
    done(server.service.rest().delete_checkpoint_from_tinker_path(gone))
    expect(not checkpoint(server, run, "gone"), "it is still listed")
    expect(checkpoint(server, run, "kept"), "the other is gone too")
    expect_refused(wire.load(run, 3, gone), statuses=(400, 404, 410))
    again = wire.call("DELETE", f"training_runs/{run}/checkpoints/weights/gone")
    expect(again.status_code in (200, 204, 404), f"to delete it again: {again.status_code}")
    wire.result(wire.load(run, 4, kept))


@check
def sampler_survives_its_checkpoint(server: ServerUnderTest) -> None:
    """a sampling client continues after its checkpoint was deleted, or fails immediately; it never hangs"""
    adapter = server.adapter()
    path = adapter.save_for_sampler(server.wire.fresh("gone"))
    sampler_id = server.wire.sampling_session(server.wire.session(), 1, model_path=path).json()["sampling_session_id"]
    done(server.service.rest().delete_checkpoint_from_tinker_path(path))
    answer = server.wire.sample(server.text(4), sampling_session_id=sampler_id, seq_id=1)
    if answer.status_code == 200:
        server.wire.outcome(server.wire.accepted(answer))
    else:
        expect_refused(answer, statuses=(400, 404, 410))


@check
def time_to_live(server: ServerUnderTest) -> None:
    """a time to live can be set when saving and later, taken away, and not be too short"""
    wire, run = server.wire, server.model()
    path = wire.result(wire.save(run, 1, "mortal", ttl_seconds=7200))["path"]
    rest = server.service.rest()

    def lasts() -> float | None:
        entry = checkpoint(server, run, "mortal")
        expires = entry.get("expires_at")
        if expires is None:
            return None
        return (time_of(str(expires)) - time_of(str(entry["time"]))).total_seconds()

    expect_close(lasts(), 7200, 60, "seconds to live, from saving")
    done(rest.set_checkpoint_ttl_from_tinker_path(path, 86400))
    expect_close(lasts(), 86400, 120, "seconds to live, set later")
    done(rest.set_checkpoint_ttl_from_tinker_path(path, None))
    expect_equal(lasts(), None, "expires_at")
    for seconds in (5, -1, 10**10):
        answer = wire.call("PUT", f"training_runs/{run}/checkpoints/weights/mortal/ttl", {"ttl_seconds": seconds})
        expect_refused(answer, "ttl_seconds")
    expect_refused(wire.save(run, 2, "brief", ttl_seconds=5), "ttl_seconds")


@check
def publish(server: ServerUnderTest) -> None:
    """a checkpoint can be made public, and private again"""
    run, [path] = saved(server, "shared")
    rest = server.service.rest()
    done(rest.publish_checkpoint_from_tinker_path(path))
    expect_equal(checkpoint(server, run, "shared").get("public"), True, "public")
    done(rest.unpublish_checkpoint_from_tinker_path(path))
    expect_equal(checkpoint(server, run, "shared").get("public"), False, "public")


@check
def metadata(server: ServerUnderTest) -> None:
    """metadata given with a model and a checkpoint comes back with them"""
    wire = server.wire
    run = server.model(user_metadata={"purpose": "contract"})
    wire.result(wire.save(run, 1, "noted", user_metadata={"note": "here"}))
    found = wire.answer("GET", f"training_runs/{run}")
    expect_equal(found.get("user_metadata"), {"purpose": "contract"}, "metadata of the run")
    expect_equal(checkpoint(server, run, "noted").get("user_metadata"), {"note": "here"}, "metadata of the checkpoint")


@check
def sessions(server: ServerUnderTest) -> None:
    """a session lists its runs and samplers, and is itself listed"""
    wire = server.wire
    session = wire.session()
    run = wire.result(wire.create_model(session))["model_id"]
    sampler = wire.sampling_session(session).json()["sampling_session_id"]
    rest = server.service.rest()
    found = done(rest.get_session(session))
    expect_equal((found.training_run_ids, found.sampler_ids), ([run], [sampler]), "runs, samplers")
    expect(session in done(rest.list_sessions(limit=5)).sessions, "it is not among the newest five")
    wire.unload(run)
    expect_refused(wire.call("GET", "sessions/session_never_was"), statuses=(404,))


@check
def session_metadata(server: ServerUnderTest) -> None:
    """metadata given to a service client is its session's"""
    service = Service(server.target.base_url, server.target.api_key, user_metadata={"who": "contract"})
    adapter = server.keep(service.adapter(server.target.model, rank=2, train_unembed=False))
    found = server.wire.answer("GET", f"sessions/{adapter.id.split(':')[0]}")
    expect_equal(found.get("user_metadata"), {"who": "contract"}, "user_metadata")


@check
def unknown_checkpoint(server: ServerUnderTest) -> None:
    """requests about an unknown checkpoint are 404"""
    run = server.model()
    at = f"training_runs/{run}/checkpoints/weights/absent"
    for method, path, body in (("PUT", f"{at}/ttl", {"ttl_seconds": 7200}), ("POST", f"{at}/publish", None)):
        expect_refused(server.wire.call(method, path, body), statuses=(404,))
    expect_refused(server.wire.post("weights_info", {"tinker_path": f"tinker://{run}/weights/absent"}), statuses=(404,))
