"""Unsharded transformers models, from which a sharded one takes its weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from skyrl_train.config import SkyRLConfig
from skyrl_train.models.build import build_model, get_transformer
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.scoring_check import check_scoring
from skyrl_train.models.value_model import ValueModel
from skyrl_train.training_backends.base import ModelName

FullModel = ScoringModel | ValueModel


def build_full_model(cfg: SkyRLConfig, name: ModelName, path: str, *, with_weights: bool) -> FullModel:
    """Build an unsharded model on the CPU; without weights its parameters have only shapes."""
    # `megatron_config.model_config_kwargs` is passed where other backends read such entries.
    settings = getattr(cfg.trainer, name)
    overrides = settings.model_config_kwargs | settings.megatron_config.model_config_kwargs
    trainer = replace(cfg.trainer, **{name: replace(settings, model_config_kwargs=overrides)})
    device = torch.device("cpu")
    cfg = replace(cfg, trainer=trainer)
    model = build_model(cfg, name, path, device=device, is_trained=False, with_weights=with_weights)
    if with_weights:
        check_scoring(model, path)
    return model


def get_full_weights(model: FullModel) -> dict[str, torch.Tensor]:
    """Return the weights of a model under the names of `gather_parameters`."""
    weights: dict[str, torch.Tensor] = dict(get_transformer(model).named_parameters())
    if isinstance(model, ValueModel):
        weights[f"{model.head_name}.weight"] = model.head.weight
    return weights


def from_first_rank(
    whole: Mapping[str, torch.Tensor] | None, shapes: Mapping[str, torch.Size], device: torch.device
) -> Callable[[str], torch.Tensor]:
    """Return a function that broadcasts a weight of rank 0 by name, float32 on each rank's device. A collective.

    Args:
        whole: on rank 0; None elsewhere.
    """

    def read(name: str) -> torch.Tensor:
        if whole is None:
            tensor = torch.empty(shapes[name], device=device)
        else:
            # Only one weight at a time is on the device.
            tensor = whole[name].detach().to(device, torch.float32).contiguous()
        if dist.get_world_size() > 1:
            dist.broadcast(tensor, 0)
        return tensor

    return read
