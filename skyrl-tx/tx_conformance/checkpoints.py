"""Saving, loading and resuming; snapshots that never change."""

import inspect

from tx_conformance.archive import archive_url, fetch
from tx_conformance.checks import Skip, check, expect, expect_close, expect_equal, expect_far, expect_refused
from tx_conformance.client import AdapterHandle, done, text_datum
from tx_conformance.server import ServerUnderTest

STEP = {"learning_rate": 1e-2, "beta1": 0.9}


def learn(server: ServerUnderTest, adapter: AdapterHandle, steps: int = 2, seed: int = 1) -> None:
    for _ in range(steps):
        adapter.backward([text_datum(server.text(17, seed=seed))])
        adapter.step(**STEP)


def trained(server: ServerUnderTest) -> AdapterHandle:
    adapter = server.adapter()
    learn(server, adapter)
    return adapter


@check
def save_and_load(server: ServerUnderTest) -> None:
    """load_state brings the weights back, bit for bit, whatever was learned since"""
    adapter = trained(server)
    path = adapter.save(server.wire.fresh("here"))
    saved = adapter.logprobs(server.lesson)[0].tolist()
    learn(server, adapter)
    expect_far(adapter.logprobs(server.lesson), saved, 1e-4, "learning did nothing")
    adapter.load(path)
    expect_equal(adapter.logprobs(server.lesson)[0].tolist(), saved, "log-probs after loading")


@check
def path_form(server: ServerUnderTest) -> None:
    """a saved state's path is tinker://RUN/weights/NAME, a sampler's tinker://RUN/sampler_weights/NAME"""
    adapter, name = server.adapter(), server.wire.fresh("step-1.5")
    expect_equal(adapter.save(name), f"tinker://{adapter.id}/weights/{name}", "path")
    expect_equal(adapter.save_for_sampler(name), f"tinker://{adapter.id}/sampler_weights/{name}", "sampler path")


@check
def optimizer_comes_back_when_asked(server: ServerUnderTest) -> None:
    """load_state_with_optimizer resumes exactly; load_state starts with a fresh optimizer"""
    adapter = trained(server)
    path = adapter.save(server.wire.fresh("moments"))
    learn(server, adapter, seed=2)
    undisturbed = adapter.logprobs(server.lesson)[0]
    adapter.load(path, optimizer=True)
    learn(server, adapter, seed=2)
    expect_equal(adapter.logprobs(server.lesson)[0].tolist(), undisturbed.tolist(), "with the optimizer")
    adapter.load(path)
    learn(server, adapter, seed=2)
    expect_far(adapter.logprobs(server.lesson)[0], undisturbed, 1e-4, "without the optimizer: the same all the same")


@check
def loading_clears_gradient(server: ServerUnderTest) -> None:
    """a load clears the accumulated gradient"""
    adapter = trained(server)
    path = adapter.save(server.wire.fresh("clear"))
    adapter.backward([text_datum(server.text(17, seed=3))])
    adapter.load(path, optimizer=True)
    before = adapter.logprobs(server.lesson)[0].tolist()
    adapter.step(learning_rate=0.1)
    expect_equal(adapter.logprobs(server.lesson)[0].tolist(), before, "log-probs after a step without gradient")


@check
def resume(server: ServerUnderTest) -> None:
    """a training client created from a state is a new model with its weights and rank"""
    adapter = trained(server)
    path = adapter.save(server.wire.fresh("resume"))
    resumed = server.keep(server.service.resume(path))
    expect(resumed.id != adapter.id, "it is the same model")
    expect_equal(resumed.info().lora_rank, 4, "lora_rank")
    expect_equal(resumed.logprobs(server.lesson)[0].tolist(), adapter.logprobs(server.lesson)[0].tolist(), "log-probs")


@check
def resume_with_optimizer(server: ServerUnderTest) -> None:
    """a client created with the optimizer continues exactly like the original"""
    adapter = trained(server)
    resumed = server.keep(server.service.resume(adapter.save(server.wire.fresh("resume")), optimizer=True))
    for one in (adapter, resumed):
        learn(server, one, seed=2)
    expect_equal(resumed.logprobs(server.lesson)[0].tolist(), adapter.logprobs(server.lesson)[0].tolist(), "log-probs")


@check
def create_by_loading(server: ServerUnderTest) -> None:
    """load_weights with a session creates a model with a predictable id and seqs that start at 1"""
    wire, adapter = server.wire, trained(server)
    path, session = adapter.save(wire.fresh("made")), wire.session()
    body = {"session_id": session, "model_seq_id": 5, "path": path, "optimizer": True, "type": "load_weights"}
    result = wire.result(wire.post("load_weights", body))
    model_id = f"{session}:train:5"
    expect_equal(result.get("model_id", model_id), model_id, "model_id")
    logprobs = wire.logprobs(model_id, 1, server.lesson)
    expect_close(logprobs, adapter.logprobs(server.lesson)[0], 1e-5, "log-probs")
    wire.unload(model_id)


@check
def saved_state_outlives_its_model(server: ServerUnderTest) -> None:
    """a state can be resumed after the model it came from was unloaded"""
    adapter = trained(server)
    path, before = adapter.save(server.wire.fresh("outlives")), adapter.logprobs(server.lesson)[0].tolist()
    server.wire.unload(adapter.id)
    resumed = server.keep(server.service.resume(path))
    expect_equal(resumed.logprobs(server.lesson)[0].tolist(), before, "log-probs")


@check
def saving_a_name_again(server: ServerUnderTest) -> None:
    """a name that is taken is written over if asked and refused if `overwrite` is false; a request that says neither
    gets one of the two, and not what clients retry for minutes"""
    wire = server.wire
    model_id, name = server.model(), wire.fresh("twice")
    wire.result(wire.save(model_id, 1, name))
    again = wire.save(model_id, 2, name)
    expect(again.status_code < 409 or again.status_code == 422, f"answered {again.status_code}")
    if again.status_code == 200:
        wire.outcome(wire.accepted(again))
    refused = wire.save(model_id, 3, name, overwrite=False)
    if refused.status_code == 200:
        expect("error" in wire.outcome(wire.accepted(refused)), "it was written over though overwrite is false")
    else:
        expect_refused(refused)
    over = wire.result(wire.save(model_id, 4, name, overwrite=True))
    expect_equal(over.get("path"), f"tinker://{model_id}/weights/{name}", "path when overwriting")


@check
def overwritten_by_the_sdk(server: ServerUnderTest) -> None:
    """save_state(overwrite=True) replaces what a name stood for"""
    adapter = trained(server)
    if "overwrite" not in inspect.signature(adapter.client.save_state).parameters:
        raise Skip("this SDK cannot overwrite")
    name = server.wire.fresh("over")
    adapter.save(name)
    learn(server, adapter)
    path, wanted = adapter.save(name, overwrite=True), adapter.logprobs(server.lesson)[0].tolist()
    learn(server, adapter)
    adapter.load(path)
    expect_equal(adapter.logprobs(server.lesson)[0].tolist(), wanted, "log-probs after loading")


@check
def old_sampler_keeps_its_weights(server: ServerUnderTest) -> None:
    """a sampler keeps its weights bit for bit while training continues"""
    adapter = trained(server)
    sampler = adapter.sampler()
    before = sampler.logprobs(server.lesson)[1:]
    expect_close(before, adapter.logprobs(server.lesson)[0], 2e-3, "sampler and trainer")
    learn(server, adapter, steps=4)
    expect_equal(sampler.logprobs(server.lesson)[1:], before, "log-probs of the old sampler")
    newer = adapter.sampler().logprobs(server.lesson)[1:]
    expect_close(newer, adapter.logprobs(server.lesson)[0], 2e-3, "new sampler and trainer")
    expect_far(newer, before, 1e-3, "the new sampler has the old weights")
    expect_equal(sampler.logprobs(server.lesson)[1:], before, "log-probs of the old sampler, once more")


@check
def sampling_disturbs_no_training(server: ServerUnderTest) -> None:
    """sampling an older state leaves the weights in training as they are"""
    adapter = trained(server)
    old = server.service.sampler(adapter.save_for_sampler(server.wire.fresh("old")))
    learn(server, adapter)
    before = adapter.logprobs(server.lesson)[0].tolist()
    old.ask(server.text(5), max_tokens=4)
    expect_equal(adapter.logprobs(server.lesson)[0].tolist(), before, "log-probs of the trainer")


@check
def named_sampler(server: ServerUnderTest) -> None:
    """sampler weights with a name can be sampled by their path, also after the model was unloaded"""
    adapter = trained(server)
    path = adapter.save_for_sampler(server.wire.fresh("named"))
    wanted = adapter.logprobs(server.lesson)[0]
    server.wire.unload(adapter.id)
    expect_close(server.service.sampler(path).logprobs(server.lesson)[1:], wanted, 2e-3, "log-probs")


@check
def ephemeral_sampler_by_wire(server: ServerUnderTest) -> None:
    """weights for a sampler saved without a name answer with a sampling session that can be asked at once"""
    wire = server.wire
    model_id = server.model()
    result = wire.result(wire.save_for_sampler(model_id, 1, sampling_session_seq_id=4))
    sampler_id = result["sampling_session_id"]
    sampled = wire.result(wire.sample(server.text(4), sampling_session_id=sampler_id, seq_id=1))
    expect_equal(len(sampled["sequences"]), 1, "sequences")


@check
def weights_info(server: ServerUnderTest) -> None:
    """weights_info says what a state needs to be resumed"""
    adapter = server.adapter(rank=8, train_mlp=False)
    info = done(server.service.rest().get_weights_info_by_tinker_path(adapter.save(server.wire.fresh("info"))))
    expect_equal((info.base_model, info.is_lora, info.lora_rank), (server.target.model, True, 8), "model, lora, rank")
    raw = server.wire.answer("POST", "weights_info", {"tinker_path": adapter.save(server.wire.fresh("info"))})
    flags = (raw.get("train_attn"), raw.get("train_mlp"), raw.get("train_unembed"))
    expect_equal(flags, (True, False, False), "train_attn, train_mlp, train_unembed")


@check
def archive(server: ServerUnderTest) -> None:
    """a checkpoint's archive is a PEFT adapter of its weights, for the SDKs that fetch one too"""
    adapter = trained(server)
    for path in (adapter.save_for_sampler(server.wire.fresh("out")), adapter.save(server.wire.fresh("out"))):
        peft = fetch(server.wire, path)
        expect(peft.weights and abs(peft.all("B")).max() > 0, "no weights in it")
        expect(all(name.startswith("base_model.model.") for name in peft.weights), f"names: {list(peft.weights)[:2]}")
    rest = server.service.rest()
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        url = done(rest.get_checkpoint_archive_url_from_tinker_path(path)).url
        expect(url.startswith("http"), f"url {url!r}")


@check
def archive_of_nothing(server: ServerUnderTest) -> None:
    """the archive of a checkpoint that is not there is 404"""
    model_id = server.model()
    path = server.wire.result(server.wire.save(model_id, 1, server.wire.fresh("there")))["path"]
    archive_url(server.wire, path)
    answer = server.wire.call("GET", f"training_runs/{model_id}/checkpoints/weights/absent/archive")
    expect_refused(answer, statuses=(404,))


@check
def rank_must_fit(server: ServerUnderTest) -> None:
    """a state of another rank is refused, and the model stays as it was"""
    path = server.adapter(rank=8).save(server.wire.fresh("rank"))
    adapter = trained(server)
    before = adapter.logprobs(server.lesson)[0].tolist()
    try:
        adapter.load(path)
    except Exception as error:  # each version has its own
        expect("rank" in str(error).lower(), f"the refusal does not speak of the rank: {error}")
    else:
        expect(False, "a state of rank 8 was loaded into a model of rank 4")
    expect_equal(adapter.logprobs(server.lesson)[0].tolist(), before, "log-probs after the refusal")
