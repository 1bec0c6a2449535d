"""Tiny models of each architecture in the table: the native engine's tokens and log-probs are those of transformers."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from native_runs import log_probs_of, make_core, random_prompts, run, same_bits

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train.inference_engines.native.loading import cache_bytes_of_token, load_model
from skyrl_train.inference_engines.native.packed_linear import pack_linears
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, PromptScoring, Request
from skyrl_train.inference_engines.native.weights import EngineWeights
from skyrl_train.inference_engines.request import Completion
from skyrl_train.memory_plan.memory import compute_cache_bytes
from skyrl_train.memory_plan.model_shape import compute_model_shape
from skyrl_train.models.causal_lm import load_causal_lm
from skyrl_train.models.lora import gather_exported_parameters
from skyrl_train.models.scoring import ScoringModel
from skyrl_train_testing.architectures import ARCHITECTURES

CPU = torch.device("cpu")
DAILY = {"gemma2", "gpt_oss", "deepseek_v3", "qwen3_5_moe"}
EACH = [pytest.param(name, marks=[] if name in DAILY else pytest.mark.slow) for name in ARCHITECTURES]


def reference(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model with attention and experts written out."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if any(hasattr(module, "_is_expert_parallel") for module in model.modules()):
        model.set_experts_implementation("eager")
    return model


def requests_of(prompts: list[np.ndarray], **params: Any) -> list[Request]:
    """Every second one greedy, of different lengths: rows leave at different times, and others take their places."""
    return [
        Request(
            prompt,
            EngineSamplingParams(max_tokens=9 + 7 * (i % 4), temperature=float(i % 2), ignore_eos=True, **params),
            (5, i),
        )
        for i, prompt in enumerate(prompts)
    ]


def assert_scores(model: Any, requests: list[Request], completions: list[Completion]) -> None:
    for request, completion in zip(requests, completions, strict=True):
        _, expected = log_probs_of(model, request.prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=1e-5)
        if request.params.is_greedy:
            with torch.no_grad():
                logits = model(torch.tensor([[*request.prompt, *completion.token_ids]])).logits[0]
            assert completion.token_ids == logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.first_case
@pytest.mark.parametrize("name", EACH)
def test_engine_log_probs_equal_transformers(name, folder_of):
    model, core = reference(folder_of(name)), make_core(folder_of(name), max_num_seqs=6)
    long, short, *others = random_prompts([130, 20, 40, 3, 1, 33])
    prompts = [long, short, short, *others, short, np.append(short[:-1], 7)]  # more than run at a time, some equal
    requests = requests_of(prompts)
    completions = run(core, requests, late=requests[3:6])
    assert_scores(model, requests, completions)
    # The next turn begins with what was written before.
    turns = [np.concatenate([r.prompt, c.token_ids, [9, 8]]) for r, c in zip(requests, completions, strict=True)]
    requests = requests_of(turns)
    completions = run(core, requests)
    assert_scores(model, requests, completions)
    cached = [completion.num_cached_prompt_tokens for completion in completions]
    assert all(cached) if ARCHITECTURES[name].prefix_cache else not any(cached)
    # Prompts that are scored, and weights that change while others run.
    for request in (scored := requests_of(turns[:3])):
        request.scoring = PromptScoring(temperature=1.0, num_top=2)
    for request, completion in zip(scored, run(core, scored), strict=True):
        expected, _ = log_probs_of(model, request.prompt, [3])
        assert completion.prompt_log_probs is not None
        torch.testing.assert_close(torch.tensor(completion.prompt_log_probs), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for each in (model, core.model):
            torch.manual_seed(3)
            for parameter in each.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    pack_linears(core.model)
    core.update_version(1)
    requests = requests_of(turns)
    assert_scores(model, requests, run(core, requests))


@pytest.mark.first_case
@pytest.mark.parametrize("name", EACH)
def test_outputs_are_bit_exact_for_any_batch_composition(name, folder_of):
    """A row alone, beside others, and in parts of a long prompt; where the table says so, also interrupted."""
    core = make_core(folder_of(name))
    prompts = random_prompts([50, 7, 90, 1, 33])
    alone = [run(core, [request])[0] for request in requests_of(prompts)]
    crowd = make_core(folder_of(name), max_prefill_tokens=64)
    requests = requests_of(prompts)
    for expected, answer in zip(alone, run(crowd, requests, late=requests[1::2]), strict=True):
        assert same_bits(answer, expected)
    whole = alone[2]
    longer = np.concatenate([prompts[2], whole.token_ids[:5]])
    params = EngineSamplingParams(max_tokens=len(whole.token_ids) - 5, temperature=0.0, ignore_eos=True)
    rest = run(core, [Request(longer, params, (5, 2))])[0]
    assert rest.token_ids == whole.token_ids[5:]
    assert (rest.log_probs == whole.log_probs[5:]) or not ARCHITECTURES[name].bit_exact
    assert rest.log_probs == pytest.approx(whole.log_probs[5:], abs=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "deepseek_v3" else pytest.mark.slow) for name in ARCHITECTURES]
)
@torch.no_grad()
def test_bfloat16_error_is_bounded_by_transformers_error(name, folder_of):
    core = make_core(folder_of(name), dtype="bfloat16")
    params = EngineSamplingParams(max_tokens=24, ignore_eos=True)
    requests = [Request(p, params, (5, i)) for i, p in enumerate(random_prompts(2 * [50, 20, 40, 3, 1, 33, 9, 8]))]
    completions = run(core, requests)
    exact, rounded = reference(folder_of(name)), reference(folder_of(name), torch.bfloat16)
    trained = ScoringModel(hf.AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.bfloat16))
    found: list[torch.Tensor] = []
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([[*request.prompt, *completion.token_ids]])
        own = trained(ids, torch.ones_like(ids), 24, 1.0).log_probs[0]
        theirs = [log_probs_of(model, request.prompt, completion.token_ids)[1] for model in (exact, rounded)]
        found.append(torch.stack([torch.tensor(completion.log_probs), own, *theirs]).float())
    engine, trainer, exact, rounded = torch.cat(found, dim=1)
    error = (rounded - exact).abs().mean()
    assert 0 < (engine - exact).abs().mean() < 1.5 * error
    assert (engine - trainer).abs().mean() < error


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie"])
def test_unloaded_weights_keep_float32_of_transformers(name, folder_of, tmp_path):
    """A trainer sends biases of routers in float32; another model of this process shares what it has."""
    folder = str(tmp_path)
    sizes: dict[str, Any] = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, head_dim=8)
    if name == "ernie":
        experts: dict[str, Any] = dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0)
        config = hf.Ernie4_5_MoeConfig(**sizes, **experts, intermediate_size=64, vocab_size=99)
        hf.Ernie4_5_MoeForCausalLM(config).save_pretrained(folder)
    else:
        folder = folder_of(name)

    def load(**settings: Any) -> dict[str, torch.Tensor]:
        plain: dict[str, Any] = dict(dtype="bfloat16", model_config_kwargs=None, trust_remote_code=False)
        model = load_model(folder, device=CPU, **plain, **settings)
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    loaded = load()
    dtypes = {each: tensor.dtype for each, tensor in loaded.items()}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    for others in (load(dummy_weights=True), load(shared_weights=loaded)):
        assert {each: tensor.dtype for each, tensor in others.items()} == dtypes
    trained = load_causal_lm(folder, device=CPU)
    assert all(tensor.dtype == dtypes[each] for each, tensor in gather_exported_parameters(trained, torch.bfloat16))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in {"deepseek_v3", "qwen3_5"} else pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def test_row_memory_equals_planner_estimate(name, folder_of):
    core = make_core(folder_of(name))
    run(core, [Request(p, EngineSamplingParams(max_tokens=3), (0, i)) for i, p in enumerate(random_prompts([40] * 4))])
    cache = core._cache
    held = [*cache.tensors(), *(each for state in cache._states.values() for each in state)]
    token, answer = compute_cache_bytes(compute_model_shape(core.model.config), number=4)
    assert cache.length == 64
    assert sum(tensor.nbytes for tensor in held) == cache.num_rows * (64 * token + answer)
    assert cache_bytes_of_token(core.model) == token


@pytest.mark.parametrize("name", EACH)
def test_trainer_provides_all_weights_of_engine(name, folder_of):
    trained = load_causal_lm(folder_of(name), device=CPU)
    weights = EngineWeights(make_core(folder_of(name)).model, CPU, 60.0)
    sent = {parameter_name: tensor.shape for parameter_name, tensor in gather_exported_parameters(trained)}
    assert sent == weights._shapes


def test_linear_attention_rejects_speculation(folder_of):
    with pytest.raises(ConfigError, match="num_speculative_tokens=4"):
        NativeInferenceEngine(folder_of("qwen3_5"), num_speculative_tokens=4)
