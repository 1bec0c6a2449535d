"""Routes of a mixture: recorded, replayed, and seen to be wrong where they are those of another token, layer or row."""

from typing import Any

import pytest
import torch
import transformers

from skyrl_train.errors import ConfigError
from skyrl_train.expert_routes import no_route
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.transformers_names import enable_gradient_checkpointing

_SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    num_experts_per_tok=2,
    initializer_range=0.3,
    pad_token_id=0,
)
_LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
_GROUPED = dict(n_routed_experts=8, moe_intermediate_size=16, n_group=4, topk_group=2, first_k_dense_replace=1)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", dict(num_experts=8, moe_intermediate_size=16, head_dim=8, mlp_only_layers=[1])),
    "qwen2": ("Qwen2Moe", dict(num_experts=8, moe_intermediate_size=16, shared_expert_intermediate_size=16)),
    "mixtral": ("Mixtral", dict(num_local_experts=8)),
    "olmoe": ("Olmoe", dict(num_experts=8)),
    # A choice of groups before that of experts, a bias that only chooses, a sigmoid, a scale.
    "deepseek_v3": ("DeepseekV3", _LATENT | _GROUPED | dict(routed_scaling_factor=2.5)),
    "glm4": ("Glm4Moe", _GROUPED | dict(head_dim=8)),
    "granite": ("GraniteMoe", dict(num_local_experts=8)),
}
EXPERTS = 8


def make_model(family: str = "qwen3", **settings: Any) -> Any:
    name, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(_SIZES | own | settings))
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def scoring(model: Any, packing: bool = True) -> ScoringModel:
    return ScoringModel(model, packing=packing, replay_setting="trainer.policy.routing_replay=R2")


def step(model: ScoringModel, batch: Any, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """Scores of a batch, and the gradients of their sum."""
    model.zero_grad()
    scores = model(*batch, 1.0, **options)
    scores.log_probs.sum().backward()
    return scores, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_own_routes_is_bit_exact(family: str, ragged: Any):
    model = scoring(make_model(family))
    recorded, expected = step(model, ragged, record_routes=True)
    assert model.routing_replay is not None
    layers = 2 if family in ("qwen3", "deepseek_v3", "glm4") else 3
    assert model.routing_replay.shape == (layers, 2, EXPERTS)
    assert recorded.routes.shape == (*ragged.sequences.shape, layers, 2)
    assert ((recorded.routes == no_route(torch.uint8)) == (ragged.mask == 0)[..., None, None]).all()
    assert len(recorded.routes[ragged.mask == 1].unique()) == EXPERTS
    replayed, gradients = step(model, ragged, routes=recorded.routes)
    assert torch.equal(replayed.log_probs, recorded.log_probs)
    assert replayed.router.num_differing == 0
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)
    untouched, _ = step(model, ragged)
    assert torch.equal(untouched.log_probs, recorded.log_probs)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("packing", [True, False])
def test_foreign_routes_are_replayed_in_recomputed_layers(ragged: Any, packing: bool, reentrant: bool | None):
    """Routes of another model: the backward of each checkpointed layer must take them as its forward did, and a router
    learns through the experts that were replayed."""
    other = scoring(make_model(initializer_range=0.5))
    routes = other(*ragged, 1.0, record_routes=True).routes
    expected, gradients = step(scoring(make_model()), ragged, routes=routes)
    model = make_model()
    if reentrant is not None:
        enable_gradient_checkpointing(model, use_reentrant=reentrant)
        model.enable_input_require_grads()
    replaying = scoring(model, packing)
    found, own_gradients = step(replaying, ragged, routes=routes, record_routes=True)
    assert torch.equal(found.routes, routes)
    assert found.router.num_differing > 10
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=2e-5, rtol=1e-4)
    for ours, theirs in zip(own_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    router = model.model.layers[0].mlp.gate.weight
    assert router.grad.abs().max() > 1e-3
    # The experts that a router taught are those replayed: counted as the load of the step.
    [first, *_] = found.router.counts
    real = routes[ragged.mask == 1]
    assert first.tolist() == torch.bincount(real[:, 0].flatten().long(), minlength=EXPERTS).tolist()


def test_position_without_route_is_routed_by_model(ragged: Any):
    model = scoring(make_model())
    own = model(*ragged, 1.0, record_routes=True)
    routes = own.routes.clone()
    routes[:, ::2] = no_route(torch.uint8)
    found = model(*ragged, 1.0, routes=routes)
    assert torch.equal(found.log_probs, own.log_probs)


FAULTS = {
    "shifted by a token": lambda routes: routes.roll(1, dims=1),
    "of another layer": lambda routes: routes.flip(2),
    "of another row": lambda routes: routes.roll(1, dims=0),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("packing", [True, False])
def test_misplaced_routes_change_scores(ragged: Any, make_batch: Any, packing: bool, fault: str):
    batch = make_batch([(6, 7)] * 4)  # rows of one length, so that every place has a route in all faults
    model = scoring(make_model(), packing)
    own = model(*batch, 1.0, record_routes=True)
    found = model(*batch, 1.0, routes=FAULTS[fault](own.routes))
    assert (found.log_probs - own.log_probs).abs().mean() > 0.05
    total = float(own.routes.numel())
    assert found.router.num_differing / total > 0.3


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda routes: routes[:, :, :1], "must have 2 layers and 2 experts"),
        (lambda routes: routes.to(torch.int16), "dtype torch.uint8"),
        (lambda routes: routes + 8, "must be from 0 to 7; got"),
    ],
)
def test_routes_of_other_model_are_rejected(ragged: Any, change: Any, message: str):
    model = scoring(make_model())
    assert model.routing_replay is not None
    routes = model(*ragged, 1.0, record_routes=True).routes
    model.routing_replay.shape.check(routes)
    with pytest.raises(ValueError, match=message):
        model.routing_replay.shape.check(change(routes))


def test_dense_model_is_rejected():
    sizes: dict[str, Any] = {name: size for name, size in _SIZES.items() if name != "num_experts_per_tok"}
    config = transformers.Qwen3Config(**sizes, head_dim=8)
    with pytest.raises(ConfigError, match="routing_replay=R2"):
        scoring(transformers.Qwen3ForCausalLM(config))


def test_shapes_are_computed_without_weights():
    name, own = FAMILIES["deepseek_v3"]
    with torch.device("meta"):
        model: Any = getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**(_SIZES | own))
        )
    replay = scoring(model).routing_replay
    assert replay is not None and replay.shape == (2, 2, EXPERTS)
