"""Faults planted into the Megatron backend are named: by the certificate of a model at its loading, or by the checks of
training backends."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.training_backends.base import RankInfo
from skyrl_train_testing.backend_checks import NUM_STEPS, check_training_backend, make_settings
from skyrl_train_testing.backend_layouts import BackendRanks, Layout, check_layout
from skyrl_train_testing.findings import INVARIANCES, InvarianceError

STRATEGY = {"strategy": "megatron"}


def healthy(*args: Any) -> Any:
    """Make a backend, whose modules are then there to be patched."""
    # Here, as a function that goes to a rank by value takes the registry of this process along.
    from skyrl_train.config.training_backends import TrainingBackendRegistry

    return TrainingBackendRegistry.get("megatron")(*args)


# ---- faults of the map of weights, which the certificate names


def experts_in_another_order(patch: pytest.MonkeyPatch) -> None:
    from skyrl_train.training_backends.megatron import weight_map

    right = weight_map._Experts.split_down
    patch.setattr(weight_map._Experts, "split_down", lambda deal, whole, *rank: right(deal, [whole[0].flip(0)], *rank))


def gate_and_up_exchanged_both_ways(patch: pytest.MonkeyPatch) -> None:
    """Back to the bit, and another model nevertheless."""
    from skyrl_train.training_backends.megatron import weight_map

    split, merge = weight_map.split_gate_up, weight_map.merge_gate_up
    patch.setattr(weight_map, "split_gate_up", lambda whole, *rank: split(whole[::-1], *rank))
    patch.setattr(weight_map, "merge_gate_up", lambda shards: merge(shards)[::-1])


def keys_before_queries(patch: pytest.MonkeyPatch) -> None:
    from skyrl_train.training_backends.megatron import weight_map

    right = weight_map._HeadGroups.merge
    patch.setattr(
        weight_map._HeadGroups, "merge", lambda heads, shards: [right(heads, shards)[part] for part in (0, 2, 1)]
    )


def forgotten_norm(patch: pytest.MonkeyPatch) -> None:
    from skyrl_train.training_backends.megatron import weights

    right = weights.iter_entries
    patch.setattr(weights, "iter_entries", lambda sizes: (e for e in right(sizes) if e.names != ("model.norm.weight",)))


@pytest.mark.first_case
@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("fault", "is_mixture", "error"),
    [
        (experts_in_another_order, True, r"model\.layers\.0\.mlp\.experts\.down_proj differs in \d+ of 512 numbers"),
        (gate_and_up_exchanged_both_ways, False, r"bit-exactly, but log-probs differ from transformers by"),
        (keys_before_queries, False, r"model\.layers\.0\.self_attn\.k_proj\.weight differs in \d+ of 512 numbers"),
        (forgotten_norm, False, r"model\.norm\.weight is lost"),
    ],
)
def test_certificate_names_weight_map_fault(
    fault: Callable[[pytest.MonkeyPatch], None],
    is_mixture: bool,
    error: str,
    tiny_model: str,
    save_mixture: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    path = save_mixture(tmp_path / "mixture", scale=3.0) if is_mixture else tiny_model
    backend = healthy(make_settings(path, STRATEGY), "policy", NUM_STEPS)
    backend.join(RankInfo())
    fault(monkeypatch)
    with pytest.raises(ConfigError, match=error):
        backend.load_model()


# ---- faults of a step on one rank


def last_micro_batch_only(patch: pytest.MonkeyPatch) -> None:
    from skyrl_train.training_backends.megatron.pipeline import Pipeline

    right = Pipeline._compute_loss

    def loss(pipeline: Any, *args: Any, **options: Any) -> Any:
        if options.get("objective") is not None:
            pipeline.model.zero_grad_buffer()
        return right(pipeline, *args, **options)

    patch.setattr(Pipeline, "_compute_loss", loss)


def doubled_scale(patch: pytest.MonkeyPatch) -> None:
    from skyrl_train.training_backends.megatron.pipeline import Pipeline

    right = Pipeline.forward_backward
    patch.setattr(
        Pipeline,
        "forward_backward",
        lambda pipeline, micros, temperature, objective, replicas: right(
            pipeline, micros, temperature, objective, 2 * replicas
        ),
    )


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("fault", "invariance"), [(last_micro_batch_only, "micro_batches"), (doubled_scale, "agreement")]
)
def test_single_rank_check_names_step_fault(
    fault: Callable[[pytest.MonkeyPatch], None], invariance: str, tiny_model: str, monkeypatch: pytest.MonkeyPatch
):
    def make(*args: Any) -> Any:
        backend = healthy(*args)
        fault(monkeypatch)
        return backend

    exempt = {name: "another rule's fault is injected" for name in INVARIANCES if name != invariance}
    with pytest.raises(InvarianceError) as caught:
        check_training_backend(make, tiny_model, settings=STRATEGY, exempt=exempt)
    assert caught.value.names == [invariance]


# ---- faults between ranks


def unreduced_gradients_of_norms(*args: Any) -> Any:
    """Norms that are not marked: each rank keeps the gradient that came through its own tokens."""
    backend = healthy(*args)
    from skyrl_train.training_backends.megatron.layers import RMSNorm

    right = RMSNorm.__init__

    def init(norm: Any, *args: Any, **options: Any) -> None:
        right(norm, *args, **options)
        norm.weight.sequence_parallel = False

    RMSNorm.__init__ = init  # type: ignore[method-assign]
    return backend


def lost_tied_head(*args: Any) -> Any:
    """The last stage does not get its copy of the embedding."""
    backend = healthy(*args)
    from skyrl_train.training_backends.megatron.weights import StageWeights

    StageWeights._get_holders = lambda weights, entry: {weights._get_owner(entry)}  # type: ignore[method-assign]
    return backend


def dropped_rank(*args: Any) -> Any:
    """Both ranks compute the rows of the first."""
    backend = healthy(*args)
    right = backend.join

    def join(info: RankInfo) -> None:
        right(info)
        backend.parallel = replace(backend.parallel, rank=0)

    backend.join = join
    return backend


def shards_of_one_rank_in_the_norm(*args: Any) -> Any:
    """Tensor-parallel weights that are not marked: the gradient's norm lacks those of the second rank."""
    backend = healthy(*args)
    from skyrl_train.training_backends.megatron import model

    model._mark_shards = lambda stage: None
    return backend


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("fault", "division", "words"),
    [
        (unreduced_gradients_of_norms, {"tensor_model_parallel_size": 2}, r"deterministic: (.|\n)*agreement: "),
        (shards_of_one_rank_in_the_norm, {"tensor_model_parallel_size": 2}, "after three steps"),
        (lost_tied_head, {"pipeline_model_parallel_size": 2}, "log-probs differ from transformers"),
        (dropped_rank, {}, "model"),
    ],
)
def test_layout_check_names_cross_rank_fault(
    fault: Callable[..., Any], division: dict[str, int], words: str, tiny_model: str, ranks: BackendRanks
):
    layout = Layout(2, STRATEGY | {"policy": {"megatron_config": division}}, make_backend=fault)
    with pytest.raises(InvarianceError, match=words):
        check_layout(ranks, tiny_model, layout)
