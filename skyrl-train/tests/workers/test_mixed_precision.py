"""bfloat16 is how it computes, not what it is: parameters, gradients and log-probs are float32."""

import pytest
import torch

from skyrl_train.config import FSDPConfig
from skyrl_train.distributed.process_group import make_mesh
from skyrl_train.distributed.sharded_tensor import gather_full_tensor
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.training_backends.fsdp2.sharding import shard_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_bfloat16_gives_nearly_the_log_probs_and_gradient_of_float32(
    tiny_model: str, group_of_one: None, gradient_checkpointing: bool
):
    ids = torch.randint(2, 64, (3, 10), generator=torch.Generator().manual_seed(0))
    log_probs, norms = {}, {}
    for bf16 in (False, True):
        transformer = load_causal_lm(tiny_model, device=CPU, gradient_checkpointing=gradient_checkpointing)
        model = shard_model(ScoringModel(transformer), make_mesh(CPU), FSDPConfig(), bf16=bf16)
        log_probs[bf16] = model(ids, torch.ones_like(ids), 4, 1.0).log_probs
        log_probs[bf16].sum().backward()
        gradients = [
            gather_full_tensor(parameter.grad) for parameter in model.parameters() if parameter.grad is not None
        ]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        norms[bf16] = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    assert log_probs[True].dtype == torch.float32
    assert not torch.equal(log_probs[True], log_probs[False])
    assert (log_probs[True] - log_probs[False]).abs().max() < 0.2
    assert norms[True] == pytest.approx(norms[False], rel=0.15)
