"""The gap of a mixture of experts before and after replay of the engine's routes."""

import asyncio

import pytest

from skyrl_inspect.mismatch.answers import SAMPLINGS, EngineAnswers, Questions, send_questions
from skyrl_inspect.mismatch.cells import EngineName
from skyrl_inspect.mismatch.page import format_markdown, to_plain
from skyrl_inspect.mismatch.report import Report, make_report
from skyrl_train.config import SkyRLConfig
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_mixture

PROMPTS = [[5], [7, 8, 9], list(range(20, 45)), [30, 31, 32, 33, 34, 35, 36, 37]] * 4
SAMPLING = SAMPLINGS["temperature 1"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of 64 experts, four of them for each token, that differ by much: another expert is another answer."""
    folder = tmp_path_factory.mktemp("models") / "mixture"
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_attention_heads=4, head_dim=16)
    chosen = dict(num_experts=64, num_experts_per_tok=4, vocab_size=len(tokenizer), max_position_embeddings=128)
    model = build_tiny_mixture(**sizes, **chosen)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data.mul_(8)
    model.save_pretrained(folder)
    return str(folder)


def answers_of(engine: NativeInferenceEngine) -> EngineAnswers:
    async def ask_and_end() -> EngineAnswers:
        try:
            return await send_questions(engine, Questions(prompts=PROMPTS, samplings=[SAMPLING], max_tokens=40, seed=1))
        finally:
            await engine.teardown()

    return asyncio.run(ask_and_end())


def report_on(model: str, dtype: str, *, bf16: bool, replay: str = "R3") -> Report:
    trainer = {
        "policy": {"model": {"path": model}, "routing_replay": replay},
        "bf16": bf16,
        "placement": {"device": "cpu"},
    }
    cfg = SkyRLConfig.from_dict({"trainer": trainer, "generator": {"backend": "native"}})
    engine = NativeInferenceEngine(model, dtype=dtype, return_expert_routes=replay == "R3")
    return make_report(cfg, [(EngineName(backend="native", dtype=dtype), answers_of(engine))], [SAMPLING])


@pytest.mark.first_case
@pytest.mark.parametrize("dtype, bf16", [("float32", True), ("bfloat16", False)])
def test_replay_reduces_mixture_gap_at_least_fivefold(mixture: str, dtype: str, bf16: bool):
    """One side computes in bfloat16: its routers choose otherwise where two experts are nearly as likely."""
    report = report_on(mixture, dtype, bf16=bf16)
    [cell] = report.engines[0].cells
    before, after = report.gap(cell), report.replayed_gap(cell)
    assert before is not None and after is not None
    print(f"{dtype}: {before} -> {after}, other experts {cell.differing}")
    assert 0.001 < cell.differing[report.trainer.dtype] < 0.05
    assert before.mean > 5 * after.mean
    assert before.p99 > 5 * after.p99
    assert before.kl > 25 * after.kl
    [finding] = [finding for finding in report.findings if finding.kind == "routing"]
    assert "trainer.policy.routing_replay=R3" in finding.text
    page = format_markdown(report, str, 0)
    assert "## Routing replay" in page and f"{before.mean:.2e} | {after.mean:.2e}" in page
    cells = to_plain(report, str, 0)["cells"]
    assert isinstance(cells, list)
    assert cells[1]["gap_with_routing_replay"]["mean"] == after.mean


@pytest.mark.slow
def test_report_without_routes_does_not_mention_replay(mixture: str):
    report = report_on(mixture, "float32", bf16=False, replay="off")
    assert [finding.kind for finding in report.findings] == ["agreement"]
    assert "Routing replay" not in format_markdown(report, str, 0)
    assert all(cell.differing == {} for cell in report.cells)
