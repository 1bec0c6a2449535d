"""What a user sees of sessions, runs and checkpoints, and does with them: list, page, publish, expire, delete."""

import datetime

from tx.contract.checks import check, expect, expect_close, expect_equal, expect_refused
from tx.contract.client import Service, done
from tx.contract.world import World


def saved(world: World, *names: str) -> tuple[str, list[str]]:
    """A new run with these training checkpoints; its id and their paths."""
    wire, model_id = world.wire, world.model()
    paths = [wire.result(wire.save(model_id, seq, name))["path"] for seq, name in enumerate(names, 1)]
    return model_id, paths


def checkpoint(world: World, run: str, name: str, kind: str = "weights") -> dict[str, object]:
    """A run's checkpoint as it is listed; {} if it is not."""
    listed = world.wire.answer("GET", f"training_runs/{run}/checkpoints")["checkpoints"]
    return next((one for one in listed if one["checkpoint_id"] == f"{kind}/{name}"), {})


def time_of(text: str) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text)
    expect(time.tzinfo is not None, f"time without a zone: {text}")
    return time


@check
def training_run(world: World) -> None:
    """a run can be looked up with its model, rank, last request and checkpoints"""
    adapter = world.adapter(rank=8)
    rest = world.service.rest()
    path = adapter.save(world.wire.fresh("run"))
    sampler_path = adapter.save_for_sampler(world.wire.fresh("run"))
    for run in (done(rest.get_training_run(adapter.id)), done(rest.get_training_run_by_tinker_path(path))):
        expect_equal(run.training_run_id, adapter.id, "training_run_id")
        expect_equal((run.base_model, run.is_lora, run.lora_rank), (world.target.model, True, 8), "model, lora, rank")
        expect(run.last_request_time is not None and run.model_owner, "no last_request_time or model_owner")
        expect_equal(run.last_checkpoint.tinker_path, path, "last_checkpoint")
        expect_equal(run.last_sampler_checkpoint.tinker_path, sampler_path, "last_sampler_checkpoint")


@check
def unknown_run(world: World) -> None:
    """a run that never was is 404"""
    expect_refused(world.wire.call("GET", "training_runs/no-such-run"), statuses=(404,))
    expect_refused(world.wire.call("GET", "training_runs/no-such-run/checkpoints"), statuses=(404,))


@check
def runs_in_pages(world: World) -> None:
    """runs are listed newest first, in pages that fit together"""
    made = [world.model() for _ in range(3)]
    listed = done(world.service.rest().list_training_runs(limit=3)).training_runs
    expect_equal({run.training_run_id for run in listed}, set(made), "the three newest runs")
    pages = [world.wire.answer("GET", f"training_runs?limit=1&offset={i}") for i in range(3)]
    paged = [page["training_runs"][0]["training_run_id"] for page in pages]
    expect_equal(paged, [run.training_run_id for run in listed], "runs page by page")
    cursor = pages[1]["cursor"]
    expect_equal((cursor["limit"], cursor["offset"]), (1, 1), "limit, offset")
    expect(cursor["total_count"] >= 3, f"total_count {cursor['total_count']}")
    beyond = world.wire.answer("GET", f"training_runs?limit=5&offset={cursor['total_count'] + 50}")
    expect_equal(beyond["training_runs"], [], "runs beyond the end")


@check
def bad_pages(world: World) -> None:
    """a page that cannot be is refused, naming limit or offset"""
    expect_refused(world.wire.call("GET", "training_runs?limit=-1"), "limit")
    expect_refused(world.wire.call("GET", "training_runs?offset=-1"), "offset")
    expect_refused(world.wire.call("GET", "checkpoints?limit=many"), "limit")


@check
def checkpoints(world: World) -> None:
    """a run's checkpoints are listed with type, path, time and size, and so they are for the user as a whole"""
    wire = world.wire
    run, paths = saved(world, "one", "two")
    sampler_path = wire.result(wire.save_for_sampler(run, 3, path="three"))["path"]
    rest = world.service.rest()
    listed = {one.tinker_path: one for one in done(rest.list_checkpoints(run)).checkpoints}
    expect_equal(set(listed), {*paths, sampler_path}, "paths")
    expect_equal(listed[paths[0]].checkpoint_type, "training", "type")
    expect_equal(listed[sampler_path].checkpoint_type, "sampler", "type of sampler weights")
    expect_equal(listed[sampler_path].checkpoint_id, "sampler_weights/three", "checkpoint_id")
    expect(all(one.size_bytes > 0 and not one.public for one in listed.values()), "no size, or public")
    mine = done(rest.list_user_checkpoints(limit=100))
    expect(set(listed) <= {one.tinker_path for one in mine.checkpoints}, "the user's list lacks them")


@check
def checkpoints_in_pages(world: World) -> None:
    """a user's checkpoints come in pages without overlap"""
    saved(world, "p1", "p2", "p3")
    pages = [world.wire.answer("GET", f"checkpoints?limit=1&offset={i}")["checkpoints"] for i in range(3)]
    expect_equal(len({page[0]["tinker_path"] for page in pages}), 3, "different checkpoints on three pages")


@check
def ephemeral_weights_are_not_listed(world: World) -> None:
    """weights that only serve a sampler are no checkpoints of the run"""
    run = world.model()
    world.wire.result(world.wire.save_for_sampler(run, 1, sampling_session_seq_id=1))
    listed = world.wire.answer("GET", f"training_runs/{run}/checkpoints")["checkpoints"]
    expect_equal(listed, [], "checkpoints")


@check
def delete(world: World) -> None:
    """a deleted checkpoint is gone: from the list, and for loading"""
    wire = world.wire
    run, [kept, gone] = saved(world, "kept", "gone")
    done(world.service.rest().delete_checkpoint_from_tinker_path(gone))
    expect(not checkpoint(world, run, "gone"), "it is still listed")
    expect(checkpoint(world, run, "kept"), "the other is gone too")
    expect_refused(wire.load(run, 3, gone), statuses=(400, 404, 410))
    again = wire.call("DELETE", f"training_runs/{run}/checkpoints/weights/gone")
    expect(again.status_code in (200, 204, 404), f"to delete it again: {again.status_code}")
    wire.result(wire.load(run, 4, kept))


@check
def sampler_survives_its_checkpoint(world: World) -> None:
    """a sampling client goes on after its checkpoint was deleted, or is told so at once; it never hangs"""
    adapter = world.adapter()
    path = adapter.save_for_sampler(world.wire.fresh("gone"))
    sampler_id = world.wire.sampling_session(world.wire.session(), 1, model_path=path).json()["sampling_session_id"]
    done(world.service.rest().delete_checkpoint_from_tinker_path(path))
    answer = world.wire.sample(world.text(4), sampling_session_id=sampler_id, seq_id=1)
    if answer.status_code == 200:
        world.wire.outcome(world.wire.accepted(answer))
    else:
        expect_refused(answer, statuses=(400, 404, 410))


@check
def time_to_live(world: World) -> None:
    """a time to live can be set when saving and later, taken away, and not be too short"""
    wire, run = world.wire, world.model()
    path = wire.result(wire.save(run, 1, "mortal", ttl_seconds=7200))["path"]
    rest = world.service.rest()

    def lasts() -> float | None:
        entry = checkpoint(world, run, "mortal")
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
def publish(world: World) -> None:
    """a checkpoint can be made public, and private again"""
    run, [path] = saved(world, "shared")
    rest = world.service.rest()
    done(rest.publish_checkpoint_from_tinker_path(path))
    expect_equal(checkpoint(world, run, "shared").get("public"), True, "public")
    done(rest.unpublish_checkpoint_from_tinker_path(path))
    expect_equal(checkpoint(world, run, "shared").get("public"), False, "public")


@check
def metadata(world: World) -> None:
    """metadata given with a model and a checkpoint comes back with them"""
    wire = world.wire
    run = world.model(user_metadata={"purpose": "contract"})
    wire.result(wire.save(run, 1, "noted", user_metadata={"note": "here"}))
    found = wire.answer("GET", f"training_runs/{run}")
    expect_equal(found.get("user_metadata"), {"purpose": "contract"}, "metadata of the run")
    expect_equal(checkpoint(world, run, "noted").get("user_metadata"), {"note": "here"}, "metadata of the checkpoint")


@check
def sessions(world: World) -> None:
    """a session lists its runs and samplers, and is itself listed"""
    wire = world.wire
    session = wire.session()
    run = wire.result(wire.create_model(session))["model_id"]
    sampler = wire.sampling_session(session).json()["sampling_session_id"]
    rest = world.service.rest()
    found = done(rest.get_session(session))
    expect_equal((found.training_run_ids, found.sampler_ids), ([run], [sampler]), "runs, samplers")
    expect(session in done(rest.list_sessions(limit=5)).sessions, "it is not among the newest five")
    wire.unload(run)
    expect_refused(wire.call("GET", "sessions/session_never_was"), statuses=(404,))


@check
def session_metadata(world: World) -> None:
    """metadata given to a service client is its session's"""
    service = Service(world.target.base_url, world.target.api_key, user_metadata={"who": "contract"})
    adapter = world.keep(service.adapter(world.target.model, rank=2, train_unembed=False))
    found = world.wire.answer("GET", f"sessions/{adapter.id.split(':')[0]}")
    expect_equal(found.get("user_metadata"), {"who": "contract"}, "user_metadata")


@check
def unknown_checkpoint(world: World) -> None:
    """what is asked of a checkpoint that is not there is 404"""
    run = world.model()
    at = f"training_runs/{run}/checkpoints/weights/absent"
    for method, path, body in (("PUT", f"{at}/ttl", {"ttl_seconds": 7200}), ("POST", f"{at}/publish", None)):
        expect_refused(world.wire.call(method, path, body), statuses=(404,))
    expect_refused(world.wire.post("weights_info", {"tinker_path": f"tinker://{run}/weights/absent"}), statuses=(404,))
