"""Adapters in the native engine: peft's numbers, several in one batch, replaced in flight, and bits that do not depend
on who else is there."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_runs import PROMPT, batch, engine_of, log_probs_of, make_core, random_prompts, run, same_bits, way_to
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from skyrl_train.errors import UnsupportedByEngine
from skyrl_train.inference_engines.native import packed_linear
from skyrl_train.inference_engines.native.attention import MIN_ROWS
from skyrl_train.inference_engines.native.core import NativeEngineCore
from skyrl_train.inference_engines.native.experts import PROJECTIONS
from skyrl_train.inference_engines.native.lora import Lora, group_rows_by_slot
from skyrl_train.inference_engines.native.lora_loading import read_lora
from skyrl_train.inference_engines.native.packed_linear import pack_linears
from skyrl_train.inference_engines.native.requests import NO_LORA, EngineSamplingParams, Request
from skyrl_train.inference_engines.request import Completion
from skyrl_train.weight_sync.base import LoraLoadRequest
from skyrl_train.weight_sync.fingerprint import fingerprints_of

CPU = torch.device("cpu")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]
MakeAdapter = Callable[..., str]


def add_experts(folder: Path, config: Any, rank: int, projections: list[str]) -> None:
    """Random matrices for each expert, under the names that files have them by; peft reads them."""
    tensors = load_file(folder / "adapter_model.safetensors")
    inner, width = config.moe_intermediate_size, config.hidden_size
    for layer in range(config.num_hidden_layers):
        for expert in range(config.num_experts):
            for projection in projections:
                num_in, num_out = (inner, width) if projection == "down_proj" else (width, inner)
                prefix = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{projection}.lora"
                tensors[f"{prefix}_A.weight"] = torch.randn(rank, num_in) * 0.1
                tensors[f"{prefix}_B.weight"] = torch.randn(num_out, rank) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["target_modules"] += projections
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> MakeAdapter:
    """The folder of an adapter with random matrices (B is not zero), as peft writes it."""

    def make(model_path: str, seed: int = 0, *, rank: int = 4, **config: Any) -> str:
        model = AutoModelForCausalLM.from_pretrained(model_path)
        torch.manual_seed(seed)
        settings = {"target_modules": EVERYTHING, "lora_alpha": 8, **config}
        of_experts = []
        if hasattr(model.config, "num_experts"):
            of_experts = [each for each in settings["target_modules"] if each in PROJECTIONS]
            settings["target_modules"] = [each for each in settings["target_modules"] if each not in PROJECTIONS]
        adapted = get_peft_model(model, LoraConfig(r=rank, task_type="CAUSAL_LM", **settings))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)
        folder = tmp_path_factory.mktemp("adapter")
        adapted.save_pretrained(str(folder))
        if of_experts:
            add_experts(folder, model.config, rank, of_experts)
        return str(folder)

    return make


pytestmark = [  # peft's
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]


def load(core: NativeEngineCore, folder: str, name: str = "first", version: int = 1) -> Lora:
    layers = read_lora(folder, core.model, 64)
    core.loras.load(LoraLoadRequest(name=name, path=folder, version=version), layers, "full")
    lora = core.loras.get_by_name(name)
    assert lora is not None
    return lora


@pytest.mark.first_case
@pytest.mark.parametrize(
    "name, config",
    [
        ("qwen3", {}),  # tied: the output layer has an adapter, the embedding has none
        ("llama", {"rank": 20, "use_rslora": True}),
        ("qwen2", {"rank": 2, "rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.1.mlp.up_proj": 32}}),
        ("qwen3_moe", {"target_modules": ATTENTION}),
        ("qwen3_moe", {"rank": 5}),
        ("qwen3_moe", {"target_modules": ["q_proj", "down_proj"], "rank": 18}),
        ("qwen2_window", {"target_modules": ["down_proj"]}),
    ],
)
def test_log_probs_equal_peft(tiny_models, adapter, name, config):
    """Adapter and plain model share one batch; prompts and responses are compared."""
    folder = adapter(tiny_models(name), **config)
    plain = AutoModelForCausalLM.from_pretrained(tiny_models(name))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_models(name)), folder).eval()
    core = make_core(tiny_models(name))
    lora = load(core, folder)
    params = EngineSamplingParams(max_tokens=25, prompt_logprobs=0)
    prompts = random_prompts([1, 2, 7, 33, 64, 150])
    for chosen in ([lora] * 6, [lora, None] * 3):
        requests = [Request(p, params, (0, i), used) for i, (p, used) in enumerate(zip(prompts, chosen, strict=True))]
        gap = 0.0
        for request, answer in zip(requests, run(core, requests), strict=True):
            of_prompt, of_answer = log_probs_of(
                plain if request.lora is None else adapted, request.prompt, answer.token_ids
            )
            torch.testing.assert_close(torch.tensor(answer.log_probs), of_answer, atol=1e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(answer.prompt_log_probs), of_prompt, atol=1e-5, rtol=0)
            if request.lora is not None:
                other = log_probs_of(plain, request.prompt, answer.token_ids)[1]
                gap = max(gap, float((other - of_answer).abs().max()))
        assert gap > 0.1  # the adapter does something


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_request_is_bit_exact_among_other_adapters(tiny_models, adapter, name):
    """Three adapters of different ranks and layers, and the plain model; they come and leave at different times."""
    path = tiny_models(name)
    folders = [adapter(path, 1), adapter(path, 2, rank=30, target_modules=ATTENTION), adapter(path, 3, rank=1)]
    lengths = [1, 2, 5, 31, 32, 33, 40, 64, 65, 120, 127, 129, 200, 12, 17, 9, 80]
    prompts = random_prompts(lengths)
    budgets = np.random.default_rng(1).integers(3, 16, len(prompts)).tolist()

    def requests_with(loras: list[Lora | None]) -> list[Request]:
        return [
            Request(prompt, EngineSamplingParams(max_tokens=budget), (5, i), loras[i % 4])
            for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
        ]

    alone: list[Completion] = []
    for number, folder in enumerate([*folders, None]):
        core = make_core(path)
        lora = None if folder is None else load(core, folder)  # the only one that is loaded
        alone += [run(core, [request])[0] for request in requests_with([lora] * 4)[number::4]]
    alone = [alone[index] for index in np.argsort(np.argsort([i % 4 for i in range(len(prompts))], kind="stable"))]

    crowd = make_core(path)
    requests = requests_with([load(crowd, folder, f"number {i}") for i, folder in enumerate(folders)] + [None])
    for request, answer, expected in zip(requests, run(crowd, requests, late=requests[1::2]), alone, strict=True):
        assert same_bits(answer, expected), f"prompt of {len(request.prompt)} tokens, {request.lora}"


def test_replayed_passes_keep_adapted_completions_bit_exact(tiny_models, adapter):
    """With one adapter for all rows, with several, and with another of more ranks and layers under the same name."""
    path = tiny_models("qwen3")
    folders = [adapter(path, 1), adapter(path, 2, rank=30, target_modules=ATTENTION), adapter(path, 3, rank=40)]
    prompts = random_prompts([1, 5, 31, 40])

    def answers(**settings: Any) -> list[Completion]:
        core, completions = make_core(path, **settings), []
        for loaded in (folders[:1], folders[:2], folders[2:]):
            loras = [load(core, folder, str(index), version=index) for index, folder in enumerate(loaded)]
            for own in (loras[:1], [None], [*loras, None]):
                requests = [
                    Request(prompt, EngineSamplingParams(max_tokens=9 + i), (5, i), own[i % len(own)])
                    for i, prompt in enumerate(prompts)
                ]
                completions += run(core, requests, late=requests[1::2])
        return completions

    assert all(map(same_bits, answers(use_graphs=True), answers()))


def test_replayed_pass_isolates_adapter_with_nan(tiny_models, adapter):
    path = tiny_models("qwen3")
    core = make_core(path, use_graphs=True)
    sound, broken = load(core, adapter(path, 1), "sound"), load(core, adapter(path, 2), "broken")
    with torch.inference_mode():
        for layer in core.loras._layers.values():
            layer.b[broken.slot] = torch.nan  # pyright: ignore[reportAttributeAccessIssue]
    params, prompts = EngineSamplingParams(max_tokens=12), random_prompts([20, 30, 40])
    loras = [sound, None, broken]
    requests = [Request(prompt, params, (0, 0), lora) for prompt, lora in zip(prompts, loras, strict=True)]
    done: dict[Request, Any] = {}
    for request in requests:
        core.add_request(request)
    while core.num_running or core.num_waiting:
        done |= core.step()
    assert isinstance(done[requests[2]], FloatingPointError)
    other = make_core(path)
    again = [Request(prompts[0], params, (0, 0), load(other, adapter(path, 1))), Request(prompts[1], params, (0, 0))]
    for request, expected in zip(requests[:2], run(other, again), strict=True):
        assert same_bits(done[request], expected)


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_drafts_keep_adapted_completions_bit_exact(tiny_models, adapter, name):
    path = tiny_models(name)
    folders = [adapter(path, seed) for seed in range(2)]

    def answers(num_draft_tokens: int) -> list[Completion]:
        core = make_core(path, num_draft_tokens=num_draft_tokens)
        loras = [load(core, folder, str(index)) for index, folder in enumerate(folders)]
        params = EngineSamplingParams(max_tokens=40, temperature=0.0)
        prompts = [np.tile(prompt, 8) for prompt in random_prompts([5, 6, 7])]
        requests = [
            Request(prompt, params, (0, 0), lora=lora) for prompt, lora in zip(prompts, [*loras, None], strict=True)
        ]
        return run(core, requests)

    drafted = answers(3)
    assert all(map(same_bits, answers(0), drafted))
    assert all(answer.drafts is not None and answer.drafts.num_accepted for answer in drafted)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_base_model_is_bit_exact_when_adapters_are_loaded(tiny_models, adapter, name):
    """Bits are the same before an adapter is loaded, beside it, and after its removal, which leaves no hook."""
    [prompt] = random_prompts([40])
    core = make_core(tiny_models(name))

    def ask(lora: Lora | None = None) -> Request:
        return Request(prompt, EngineSamplingParams(max_tokens=20), (0, 0), lora)

    [before] = run(core, [ask()])
    lora = load(core, adapter(tiny_models(name)))
    [beside, other] = run(core, [ask(), ask(lora)])
    assert same_bits(before, beside) and other.log_probs != before.log_probs
    assert any(module._forward_hooks for module in core.model.modules())
    core.loras.forget("first")
    core.loras.free(lora)
    assert not any(module._forward_hooks for module in core.model.modules())
    assert not core.loras
    assert same_bits(before, run(core, [ask()])[0])


def test_prompts_are_shared_only_within_adapter_version(tiny_models, adapter):
    path = tiny_models("qwen3")
    [prompt] = random_prompts([40])
    core = make_core(path)
    first, second = load(core, adapter(path, 1), "first"), load(core, adapter(path, 2), "second")
    params = EngineSamplingParams(max_tokens=30)
    for lora in (None, first, second) * 2:
        core.add_request(Request(prompt, params, (0, 0), lora))
    core.step()
    assert core.num_prompt_tokens_computed == 3 * 40
    load(core, adapter(path, 3), "first", version=2)
    for lora in (None, first, second) * 2:
        core.add_request(Request(prompt, params, (0, 1), lora))
    done = core.step()
    assert core.num_prompt_tokens_computed == 4 * 40 + 4  # the new adapter's, once, and last tokens
    while core.num_running:
        done |= core.step()
    fresh = make_core(path)
    [expected] = run(fresh, [Request(prompt, params, (0, 1), load(fresh, adapter(path, 3)))])
    late = [done[request] for request in done if request.seed == (0, 1) and request.lora is first]
    assert len(late) == 2 and all(same_bits(completion, expected) for completion in late)


def test_weight_update_reaches_adapted_layers(tiny_models, adapter, monkeypatch):
    """W changes under the adapter: packed copies are made anew, and no prompt of the old weights is shared."""
    monkeypatch.setattr(packed_linear, "SMALLEST", 0)
    path = tiny_models("llama")
    folder = adapter(path, target_modules=EVERYTHING[:-1])
    [prompt] = random_prompts([40])
    core = make_core(path)
    lora = load(core, folder)
    core.add_request(Request(prompt, EngineSamplingParams(max_tokens=300), (0, 0), lora))
    core.step()
    with torch.inference_mode():
        for parameter in core.model.parameters():
            parameter.mul_(1.1)
    pack_linears(core.model)
    core.update_version(7)
    core.add_request(Request(prompt, EngineSamplingParams(max_tokens=10), (0, 1), lora))
    while not (outcomes := core.step()):
        pass
    [completion] = outcomes.values()
    assert isinstance(completion, Completion)
    assert core.num_prompt_tokens_computed == 2 * 40
    adapted = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.mul_(1.1)
    adapted = PeftModel.from_pretrained(adapted, folder).eval()
    _, expected = log_probs_of(adapted, prompt, completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)
    assert completion.weight_versions == [1] * 10  # the adapter's


def test_bfloat16_adapters_are_close_to_peft(tiny_models, adapter):
    folder = adapter(tiny_models("qwen3"))
    model = AutoModelForCausalLM.from_pretrained(tiny_models("qwen3"), dtype=torch.bfloat16)
    adapted = PeftModel.from_pretrained(model, folder).eval().to(torch.bfloat16)
    core = make_core(tiny_models("qwen3"), "bfloat16")
    [prompt] = random_prompts([40])
    [answer] = run(core, [Request(prompt, EngineSamplingParams(max_tokens=30), (0, 0), load(core, folder))])
    _, expected = log_probs_of(adapted.float(), prompt, answer.token_ids)
    assert (torch.tensor(answer.log_probs) - expected).abs().mean() < 0.05


# ---- groups


def test_rows_are_gathered_by_slot():
    """Rows 0, 3, 4 use slot 2 and row 2 uses slot 0: two groups of at least four places, slot 0 first."""
    slots = np.array([2, NO_LORA, 0, 2, 2])
    groups = group_rows_by_slot(slots, CPU, apart=False)
    assert groups is not None and groups.size == MIN_ROWS == 4
    assert isinstance(groups.slots, torch.Tensor) and groups.slots.tolist() == [0, 2]
    assert groups.gathered is not None and groups.gathered.tolist() == [2, 2, 2, 2, 0, 3, 4, 0]
    assert groups.rows is not None and groups.rows.tolist() == [0, 2, 3, 4]
    assert groups.places is not None and groups.places.tolist() == [4, 0, 5, 6]


def test_single_adapter_for_all_rows_skips_gathering():
    groups = group_rows_by_slot(np.array([1, 1, 1, 1]), CPU, apart=True)
    assert groups is not None and groups.slots == slice(1, 2) and groups.gathered is None


def test_rows_without_adapters_form_no_groups():
    assert group_rows_by_slot(np.full(6, NO_LORA), CPU, apart=False) is None


# ---- the engine


async def test_adapters_are_selected_by_name(tiny_models, adapter):
    path = tiny_models("qwen3")
    async with engine_of(path, max_loras=2) as engine:
        assert "lora" not in (await engine.describe()).unsupported
        with pytest.raises(ValueError, match="'policy'"):
            await engine.generate_batch(batch(PROMPT, lora="policy"))
        for number, name in enumerate(["policy", "other"]):
            await engine.load_lora(LoraLoadRequest(name=name, path=adapter(path, number), version=number + 3))
        with pytest.raises(ValueError, match="max_loras=2"):
            await engine.load_lora(LoraLoadRequest(name="third", path=adapter(path)))
        asked = [
            engine.generate_batch(batch(PROMPT, lora=name, seed=1, max_tokens=9)) for name in (None, "policy", "other")
        ]
        plain, policy, other = await asyncio.gather(*asked)
        assert [answer["weight_versions"][0] for answer in (plain, policy, other)] == [[0] * 9, [3] * 9, [4] * 9]
        assert len({tuple((a["response_logprobs"] or [])[0]) for a in (plain, policy, other)}) == 3
        await engine.unload_lora("policy")
        with pytest.raises(ValueError, match=r"'policy' .*other"):
            await engine.unload_lora("policy")
        again = await engine.generate_batch(batch(PROMPT, lora="other", seed=1, max_tokens=9))
        assert again["response_logprobs"] == other["response_logprobs"]
        await engine.load_lora(LoraLoadRequest(name="third", path=adapter(path, 0)))  # the slot of "policy"
        third = await engine.generate_batch(batch(PROMPT, lora="third", seed=1, max_tokens=9))
        assert third["response_logprobs"] == policy["response_logprobs"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
async def test_adapter_report_fingerprints_loaded_tensors(tiny_models, adapter, name):
    folder = adapter(tiny_models(name))
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    expected = {key: tensor for key, tensor in tensors.items() if ".lora_" in key}
    num_layers = {"qwen3": 2 * 7 + 1, "qwen3_moe": 2 * (4 + 4 * 3) + 1}[name]
    assert 2 * num_layers == len(expected)  # peft adds embeddings that are the model's
    async with engine_of(tiny_models(name)) as engine:
        report = await engine.load_lora(LoraLoadRequest(name="policy", path=folder, version=5))
    assert report.version == 5
    assert report.fingerprints == fingerprints_of(expected.items(), 5, "sampled")


@pytest.mark.slow
async def test_replaced_adapter_continues_running_completions(tiny_models, adapter):
    path = tiny_models("qwen3")
    first, second = adapter(path, 1), adapter(path, 2)
    async with engine_of(path) as engine:
        await engine.load_lora(LoraLoadRequest(name="policy", path=first, version=1))
        running = asyncio.ensure_future(
            engine.generate_batch(batch(PROMPT, lora="policy", max_tokens=300, ignore_eos=True))
        )
        while not len(engine._core._rows) or engine._core._rows.length[0] < 20:
            await asyncio.sleep(0.005)
        await engine.load_lora(LoraLoadRequest(name="policy", path=second, version=2))
        [versions] = (await running)["weight_versions"]
        assert versions == sorted(versions) and set(versions) == {1, 2} and len(versions) == 300


@pytest.mark.slow
async def test_adapter_is_removed_after_last_request(tiny_models, adapter):
    path = tiny_models("qwen3")
    async with engine_of(path) as engine:
        await engine.load_lora(LoraLoadRequest(name="policy", path=adapter(path, 1), version=1))
        ask = batch(PROMPT, lora="policy", max_tokens=200, ignore_eos=True, seed=1)
        expected = await engine.generate_batch(ask)
        running = asyncio.ensure_future(engine.generate_batch(ask))
        await engine.pause_generation("keep")
        leaving = asyncio.ensure_future(engine.unload_lora("policy"))
        await asyncio.sleep(0.05)
        assert not leaving.done()
        with pytest.raises(ValueError, match="'policy'"):
            await engine.generate_batch(ask)
        await engine.resume_generation()
        assert await running == expected
        await asyncio.wait_for(leaving, 10)
        assert not engine._core.loras


@pytest.mark.parametrize("level", [1, 2])
async def test_adapters_survive_sleep(tiny_models, adapter, tmp_path, level):
    """Those loaded meanwhile as well. An update brings the model's weights back after level 2, and no adapters."""
    path = tiny_models("qwen3")
    first, second = (adapter(path, seed, target_modules=ATTENTION) for seed in (1, 2))
    async with engine_of(path) as engine:
        await engine.load_lora(LoraLoadRequest(name="policy", path=first))
        before = await engine.generate_batch(batch(PROMPT, lora="policy", max_tokens=9, seed=1))
        await engine.sleep(level)
        await engine.load_lora(LoraLoadRequest(name="other", path=second))
        await engine.wake_up()
        if level == 2:
            weights = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
            async with way_to(engine, tmp_path) as sender:
                await sender.send({name: weight.detach() for name, weight in weights.items()}, 1)
        assert await engine.generate_batch(batch(PROMPT, lora="policy", max_tokens=9, seed=1)) == before
        assert await engine.generate_batch(batch(PROMPT, lora="other", max_tokens=9, seed=1)) != before


async def test_engine_without_lora_rejects_adapters(tiny_models, adapter):
    async with engine_of(tiny_models("qwen3"), max_lora_rank=0) as engine:
        assert (await engine.describe()).unsupported["lora"].endswith("(max_lora_rank=0)")
        with pytest.raises(UnsupportedByEngine, match="max_lora_rank=0"):
            await engine.load_lora(LoraLoadRequest(name="policy", path=adapter(tiny_models("qwen3"))))


# ---- what is refused


@pytest.mark.parametrize(
    "config, message",
    [
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.lora_embedding_A"),
        ({"use_dora": True}, "use_dora=True"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3]}, "trainable_token_indices=.* embeddings"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, r"modules_to_save=\['lm_head'\]"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"rank": 80}, "max_lora_rank=64"),
    ],
)
def test_adapters_beyond_low_rank_products_are_rejected(tiny_models, adapter, config, message):
    folder = adapter(tiny_models("llama"), **config)
    with pytest.raises(ValueError, match=message):
        load(make_core(tiny_models("llama")), folder)


def test_fused_experts_are_rejected_by_name(tiny_models, adapter):
    folder = adapter(
        tiny_models("qwen3_moe"), target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]
    )
    with pytest.raises(ValueError, match="target_parameters"):
        load(make_core(tiny_models("qwen3_moe")), folder)


def test_adapter_of_other_model_error_names_layer(tiny_models, adapter, tmp_path):
    folder = Path(adapter(tiny_models("llama"), target_modules=["q_proj"]))
    tensors = load_file(folder / "adapter_model.safetensors")
    config = (folder / "adapter_config.json").read_text()

    def changed(change: Callable[[str], str], cut: int | None = None) -> str:
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        (place / "adapter_config.json").write_text(config)
        changed = {change(name): value[:, :cut].contiguous() for name, value in tensors.items()}
        save_file(changed, place / "adapter_model.safetensors")
        return str(place)

    core = make_core(tiny_models("llama"))
    for place, message in [
        (changed(lambda name: name.replace("layers.1", "layers.9")), "the model has no layer model.layers.9.self_attn"),
        (changed(lambda name: name.replace("self_attn.q_proj", "input_layernorm")), "is a LlamaRMSNorm, and only"),
        (changed(str, cut=3), r"q_proj needs A \[rank, 48\] and B \[48, rank\]; got \[4, 3\] and \[48, 3\]"),
        (changed(lambda name: name.replace("1.self_attn.q_proj.lora_A", "1.mlp.up_proj.lora_A")), "has no lora_[AB]"),
    ]:
        with pytest.raises(ValueError, match=message):
            load(core, place)
    assert not core.loras  # nothing of it stayed


def test_adapters_of_some_experts_are_rejected(tiny_models, adapter, tmp_path):
    folder = Path(adapter(tiny_models("qwen3_moe"), target_modules=["q_proj", "up_proj"]))
    tensors = load_file(folder / "adapter_model.safetensors")
    shutil.copy(folder / "adapter_config.json", tmp_path)
    core = make_core(tiny_models("qwen3_moe"))
    third = {key: tensor for key, tensor in tensors.items() if ".2.up_proj." in key}
    for change, message in [
        ({key: None for key in third}, "up_proj of expert 2 is missing"),
        ({key.replace(".2.", ".4."): x.clone() for key, x in third.items()}, "4 experts, but no .*experts.4.up_proj"),
        ({key: x[:2] if "_A" in key else x[:, :2].contiguous() for key, x in third.items()}, "several ranks"),
        ({key: x[:, :-1].contiguous() for key, x in third.items() if "_A" in key}, r"needs A \[rank, 48\]"),
        ({key.replace("experts", "router"): x.clone() for key, x in third.items()}, "has no layer .*router.2.up_proj"),
    ]:
        changed = {key: tensor for key, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file(changed, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            load(core, str(tmp_path))
    assert not core.loras


def test_folder_without_adapter_is_rejected(tiny_models, tmp_path):
    core = make_core(tiny_models("llama"))
    with pytest.raises(ValueError, match="no adapter could be read from"):
        load(core, str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="peft_type"):
        load(core, str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="no adapter could be read from"):
        load(core, str(tmp_path))
