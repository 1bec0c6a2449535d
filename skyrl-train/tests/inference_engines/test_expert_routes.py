"""Routes of the native engine: all prompt and response tokens have them, whatever else runs, over interruptions."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from native_runs import PROMPT, batch, completions_of, engine_of, interrupted, make_core, random_prompts, run
from transformers import AutoModelForCausalLM

from skyrl_train.errors import ConfigError
from skyrl_train.expert_routes import ExpertRoutes, join_routes
from skyrl_train.inference_engines.continuation import join
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, Request
from skyrl_train.inference_engines.request import Completion
from skyrl_train.models.routing_replay import RoutingReplay
from skyrl_train.models.scoring import ScoringModel

SETTING = "trainer.policy.routing_replay=R3"


@pytest.fixture(scope="module")
def trainer(tiny_models: Any) -> ScoringModel:
    """The trainer's model of the same weights."""
    return ScoringModel(AutoModelForCausalLM.from_pretrained(tiny_models("qwen3_moe")), replay_setting=SETTING)


def routes_of_trainer(model: ScoringModel, ids: list[int]) -> np.ndarray:
    """The experts that the trainer's model sends each token to, [P, L, k], in the order of their numbers."""
    with torch.no_grad():
        tokens = torch.tensor([ids])
        scores = model(tokens, torch.ones_like(tokens), len(ids) - 1, 1.0, record_routes=True)
    assert scores.routes is not None
    return np.sort(scores.routes[0].numpy(), axis=-1)


def assert_routes(completion: Completion, prompt: list[int], trainer: ScoringModel) -> None:
    ids = [*prompt, *completion.token_ids]
    assert completion.routes is not None
    assert len(completion.routes) == len(ids) - 1, "the last token is not computed"
    assert completion.routes.experts.dtype == np.uint8
    found = np.sort(completion.routes.experts, axis=-1)
    assert np.array_equal(found, routes_of_trainer(trainer, ids)[:-1])


def test_routes_match_trainer_for_any_batch_composition(tiny_models: Any, trainer: ScoringModel):
    """Lengths past the attention's blocks, late joiners, rows that move when others leave, and prompts that are another
    one's or differ from it in their last token: those are copied."""
    model = make_core(tiny_models("qwen3_moe")).model
    routing = RoutingReplay(model, SETTING)
    core = NativeEngineCore(
        model, max_num_seqs=9, max_model_len=512, eos_ids=(), decode=lambda ids: "", routing=routing
    )
    prompts = random_prompts([1, 5, 33, 40, 64, 129, 200])
    prompts += [prompts[3], np.append(prompts[3][:-1], 7), prompts[5], prompts[0]]
    budgets = [3, 30, 12, 25, 7, 9, 4, 18, 22, 5, 11]
    requests = [
        Request(prompt, EngineSamplingParams(max_tokens=budget, temperature=1.0), (5, index))
        for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]
    for prompt, completion in zip(prompts, run(core, requests, late=requests[4:]), strict=True):
        assert_routes(completion, prompt.tolist(), trainer)


@pytest.mark.slow
async def test_interrupted_completion_has_uninterrupted_routes(tiny_models: Any, trainer: ScoringModel):
    settings: dict[str, Any] = dict(max_tokens=120, temperature=1.0, seed=3, ignore_eos=True)
    async with engine_of(tiny_models("qwen3_moe"), return_expert_routes=True) as engine:
        [whole] = await completions_of(engine, PROMPT, **settings)
        assert_routes(whole, PROMPT, trainer)
        before = engine.progress()
        asked = asyncio.create_task(completions_of(engine, PROMPT, **settings))
        while engine.progress() < before + 5:
            await asyncio.sleep(0)
        await engine.abort_generation()
        [part] = await asked
        assert part.stop_reason == "abort"
        rest = settings | {"max_tokens": 120 - len(part.token_ids)}
        [other] = await completions_of(engine, [*PROMPT, *part.token_ids], **rest)
    joined = join(PROMPT, [part, other], lambda ids: "", "length")
    assert joined.token_ids == whole.token_ids
    assert joined.routes == whole.routes


async def test_routes_are_contiguous_after_aborting_pause(tiny_models: Any, trainer: ScoringModel):
    prompts = [PROMPT, PROMPT[:2], [*PROMPT, 11]]
    params: dict[str, Any] = dict(max_tokens=80, temperature=1.0, seed=3, ignore_eos=True)
    completions = await interrupted(tiny_models("qwen3_moe"), prompts, params, return_expert_routes=True)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == 80
        assert_routes(completion, prompt, trainer)


def test_tokens_keep_routes_of_their_log_probs():
    """The second part computed the first again, with weights that chose otherwise."""
    old = ExpertRoutes(np.full((5, 1, 2), 1, np.uint8))
    new = ExpertRoutes(np.full((9, 1, 2), 2, np.uint8))
    parts = [
        Completion([7, 8, 9], "abort", [0] * 3, routes=old),
        Completion([], "abort", []),
        Completion([5, 6, 7, 8], "length", [1] * 4, routes=new),
    ]
    joined = join([1, 2, 3], parts, lambda ids: "", "length")
    assert joined.routes is not None
    assert joined.routes.experts[:, 0, 0].tolist() == [1] * 5 + [2] * 4
    cut = join([1, 2, 3], parts, lambda ids: "", "stop", num_tokens=3)  # a stop string ended it there
    assert cut.routes is not None and len(cut.routes) == 6
    assert join_routes([None, None]) is None


async def test_engine_returns_no_routes_when_disabled(tiny_models: Any):
    async with engine_of(tiny_models("qwen3_moe")) as engine:
        assert "expert_routes" not in await engine.generate_batch(batch(PROMPT, max_tokens=3))


def test_routes_require_mixture_of_experts(tiny_models: Any):
    with pytest.raises(ConfigError, match="needs a mixture of experts"):
        NativeInferenceEngine(tiny_models("qwen3"), return_expert_routes=True)
