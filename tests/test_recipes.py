"""Recipes under examples/recipes: every published setting is held against what the script of its row composes, prepared
data against checksums, first prompts against golden tokens, and tables against answers that one can count.

The settings below are written from the published tables, not from the scripts.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from composed_scripts import checked_config, commands_of, load_script

from skyrl_inspect.curve_bands import read_bands
from skyrl_train.step_plan import step_plan

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = REPOSITORY / "examples" / "recipes"

Settings = dict[str, Any]


def under(section: str, **settings: Any) -> Settings:
    return {f"{section}.{name}": value for name, value in settings.items()}


H100_X8 = under("trainer.placement", device="cuda", colocate_all=True, policy_num_nodes=1, policy_num_gpus_per_node=8)
TWO_NODES = H100_X8 | {"trainer.placement.policy_num_nodes": 2}


def engines(number: int, tensor_parallel: int, memory: float | None = None) -> Settings:
    counts = {
        "generator.num_inference_engines": number,
        "generator.inference_engine_tensor_parallel_size": tensor_parallel,
    }
    return counts | ({} if memory is None else {"generator.gpu_memory_utilization": memory})


def micro(forward: int, train: int) -> Settings:
    return {
        "trainer.micro_forward_batch_size_per_gpu": forward,
        "trainer.micro_train_batch_size_per_gpu": train,
        "trainer.max_tokens_per_microbatch": None,
    }


def model(name: str) -> Settings:
    return {"trainer.policy.model.path": name}


DAPO = (
    H100_X8
    | under("environment", env_class="aime")
    | under("trainer.algorithm", advantage_estimator="grpo", policy_loss_type="dual_clip", eps_clip_low=0.2)
    | under("trainer.algorithm", eps_clip_high=0.28, clip_ratio_c=10, loss_reduction="token_mean", use_kl_loss=False)
    | under("trainer.algorithm", use_kl_in_reward=False, zero_variance_filter=False)
    | under("trainer.algorithm.dynamic_sampling", type=None)
    | under("trainer.algorithm.overlong_buffer", len=4096, penalty_factor=1, counts="context")
    | under("generator", apply_overlong_filtering=True, overlong_filtering_by="end_token", n_samples_per_prompt=16)
    | under("generator", eval_n_samples_per_prompt=32, enforce_eager=True, gpu_memory_utilization=0.8)
    | under("generator.sampling_params", temperature=1, top_p=1, max_generate_length=8192)
    | under("generator.eval_sampling_params", temperature=1, top_p=0.7, max_generate_length=8192)
    | under("trainer", max_prompt_length=2048, train_batch_size=512, policy_mini_batch_size=32)
    | under("trainer", update_epochs_per_batch=1, epochs=20, eval_before_train=True, eval_interval=5)
    | under("trainer", eval_batch_size=1024, ckpt_interval=10, max_ckpts_to_keep=3, hf_save_interval=10)
    | under("trainer.policy.optimizer_config", lr=1e-6, num_warmup_steps=160, weight_decay=0.1, max_grad_norm=1.0)
)
LATER = under("trainer.algorithm.overlong_buffer", counts="response") | under(
    "generator", overlong_filtering_by="stop_reason"
)
SMALL_DAPO = DAPO | TWO_NODES | engines(16, 1) | micro(8, 4) | {"trainer.policy.fsdp_config.fsdp_size": 8}
QWEN3_1_7B = SMALL_DAPO | model("Qwen/Qwen3-1.7B-Base")
QWEN3_4B = SMALL_DAPO | model("Qwen/Qwen3-4B-Base")

SQL = (
    H100_X8
    | engines(2, 4, memory=0.7)
    | micro(8, 1)
    | model("Qwen/Qwen2.5-Coder-7B-Instruct")
    | under("environment", env_class="text2sql")
    | under("trainer.algorithm", advantage_estimator="grpo", use_kl_loss=False, grpo_norm_by_std=True)
    | under("trainer.policy.optimizer_config", lr=1e-6, max_grad_norm=0.5)
    | under("trainer", train_batch_size=256, policy_mini_batch_size=256, max_prompt_length=6000, epochs=30)
    | under("trainer", eval_before_train=True, eval_interval=5, eval_batch_size=1024, ckpt_interval=60)
    | under("trainer", hf_save_interval=30, dump_data_batch=True, resume_mode="latest")
    | under("generator", n_samples_per_prompt=5, max_input_length=29000, max_turns=6)
    | under("generator", use_conversation_multi_turn=False)
    | under("generator.sampling_params", max_generate_length=3000, stop=["</sql>", "</solution>"], temperature=0.6)
    | under("generator.sampling_params", top_p=0.95)
    | under("generator.eval_sampling_params", stop=["</sql>", "</solution>"], temperature=0)
)

SEARCH = (
    H100_X8
    | engines(4, 2, memory=0.5)
    | micro(4, 4)
    | model("Qwen/Qwen2.5-3B-Instruct")
    | under("environment", env_class="search")
    | under("trainer.algorithm", advantage_estimator="grpo", use_kl_loss=True, kl_loss_coef=0.001)
    | under("trainer.algorithm", kl_estimator_type="k3")
    | under("trainer.algorithm.off_policy_correction", tis_ratio_type=None)
    | under("trainer.policy.optimizer_config", lr=1e-6, max_grad_norm=0.5, num_warmup_steps=94)
    | under("trainer.ref.fsdp_config", cpu_offload=True)
    | under("trainer", train_batch_size=512, policy_mini_batch_size=256, epochs=1, max_prompt_length=2048)
    | under("trainer", eval_before_train=False, eval_interval=50, eval_batch_size=256, ckpt_interval=20)
    | under("trainer", max_ckpts_to_keep=5, hf_save_interval=100, resume_mode="latest")
    | under("generator", n_samples_per_prompt=5, max_input_length=4096, use_conversation_multi_turn=False)
    | under("generator.sampling_params", max_generate_length=500, stop=["</search>", "</answer>"], temperature=1)
    | under("generator.sampling_params", top_p=1)
    | under("generator.eval_sampling_params", stop=["</search>", "</answer>"], temperature=0)
    | under(
        "environment.skyrl_gym", env_configs={"search": {"search_url": "http://127.0.0.1:8000/retrieve", "topk": 3}}
    )
    | under("environment.skyrl_gym", max_env_workers=16)
)
TRUNCATED_WEIGHTS = under(
    "trainer.algorithm.off_policy_correction", tis_ratio_type="token", token_tis_ratio_clip_high=2.0
)

SWE_V0 = (
    H100_X8
    | under("trainer.algorithm", advantage_estimator="grpo", use_kl_loss=True, kl_loss_coef=0.001)
    | under("trainer.algorithm", kl_estimator_type="k3", eps_clip_low=0.2, eps_clip_high=0.2)
    | under("trainer.policy.optimizer_config", lr=1e-6)
    | under("trainer", train_batch_size=32, max_prompt_length=12000)
    | under("generator", n_samples_per_prompt=8)
)
SA_SWE = (
    TWO_NODES
    | engines(4, 4, memory=0.8)
    | model("Qwen/Qwen3-32B")
    | under("trainer", strategy="fsdp2", train_batch_size=64, policy_mini_batch_size=64, max_prompt_length=8000)
    | under("trainer", epochs=10, eval_before_train=False, eval_interval=10, eval_batch_size=128, ckpt_interval=2)
    | under("trainer", max_ckpts_to_keep=20, dump_data_batch=True, seed=1)
    | under("trainer.algorithm", advantage_estimator="rloo", grpo_norm_by_std=False, policy_loss_type="dual_clip")
    | under("trainer.algorithm", eps_clip_low=0.2, eps_clip_high=0.28, use_kl_loss=False)
    | under("trainer.algorithm", loss_reduction="seq_mean_token_sum_norm", max_seq_len=40768)
    | under("trainer.policy.optimizer_config", lr=1e-6)
    | under("trainer.policy", sequence_parallel_size=4)
    | under("trainer.ref", sequence_parallel_size=4)
    | under("generator", n_samples_per_prompt=8, enforce_eager=False, enable_prefix_caching=True)
    | under("generator", max_num_batched_tokens=16384, eval_n_samples_per_prompt=1)
    | under("generator.sampling_params", max_generate_length=32768, temperature=1, top_p=1)
)

PUBLISHED: dict[str, Settings] = {
    "dapo/run_qwen2.5_math_7b.sh": DAPO
    | engines(2, 4)
    | micro(16, 16)
    | model("Qwen/Qwen2.5-Math-7B")
    | {"trainer.eval_interval": 10, "trainer.policy.model_config_kwargs": {"max_position_embeddings": 32768}},
    "dapo/run_qwen3_1.7b_base.sh": QWEN3_1_7B,
    "dapo/run_qwen3_1.7b_base.sh FIGURES=later": QWEN3_1_7B | LATER,
    "dapo/run_qwen3_1.7b_base.sh NUM_NODES=1": QWEN3_1_7B | H100_X8 | engines(8, 1),
    "dapo/run_qwen3_1.7b_base_zero_variance.sh": QWEN3_1_7B | LATER | {"trainer.algorithm.zero_variance_filter": True},
    "dapo/run_qwen3_4b_base.sh": QWEN3_4B,
    "dapo/run_qwen3_4b_base.sh FIGURES=later": QWEN3_4B | LATER,
    "dapo/run_qwen3_4b_base_megatron.sh": DAPO | LATER | model("Qwen/Qwen3-4B-Base") | {"trainer.strategy": "megatron"},
    "dapo/run_qwen3_4b_base_lora.sh": DAPO
    | LATER
    | model("Qwen/Qwen3-4B-Base")
    | {"trainer.policy.model.lora.rank": 128, "trainer.policy.optimizer_config.lr": 1e-5},
    "dapo/run_qwen2.5_32b.sh": DAPO
    | LATER
    | micro(2, 2)
    | model("Qwen/Qwen2.5-32B")
    | under("trainer.placement", policy_num_nodes=4)
    | under("trainer.policy", sequence_parallel_size=4)
    | under("generator.sampling_params", max_generate_length=20480)
    | under("generator.eval_sampling_params", max_generate_length=20480),
    "dapo/run_qwen3_30b_a3b_base_megatron.sh": DAPO
    | LATER
    | TWO_NODES
    | TRUNCATED_WEIGHTS
    | model("Qwen/Qwen3-30B-A3B-Base")
    | under("trainer", strategy="megatron")
    | under("trainer.policy.megatron_config", tensor_model_parallel_size=4, expert_model_parallel_size=8)
    | under("generator", gpu_memory_utilization=0.7),
    "skyrl_sql/run_qwen2.5_coder_7b.sh": SQL,
    "skyrl_sql/run_qwen2.5_coder_7b_single_turn.sh": SQL
    | {"generator.max_turns": 1, "generator.max_input_length": 6000},
    "skyrl_sql/run_qwen2.5_coder_7b_conversation.sh": SQL
    | under("generator", use_conversation_multi_turn=True, append_eos_token_after_stop_str_in_multi_turn=True),
    "skyrl_sql/run_qwen2.5_coder_7b_deepspeed.sh": SQL
    | under("trainer", strategy="deepspeed")
    | under("deepspeed_config.train.zero_optimization.offload_param", device="cpu")
    | under("deepspeed_config.train.zero_optimization.offload_optimizer", device="cpu")
    | under("deepspeed_config.train.zero_optimization", sub_group_size=1e4, reduce_bucket_size=1e4)
    | under("deepspeed_config.train.zero_optimization", stage3_param_persistence_threshold=1e2)
    | under("deepspeed_config.train", disable_trace_cache=True),
    "search_r1/run_qwen2.5_3b_2_turns.sh": SEARCH | {"generator.max_turns": 2},
    "search_r1/run_qwen2.5_3b_3_turns.sh": SEARCH | {"generator.max_turns": 3},
    "search_r1/run_qwen2.5_3b_4_turns.sh": SEARCH | {"generator.max_turns": 4},
    "search_r1/run_qwen2.5_3b_4_turns.sh FIGURES=later": SEARCH | TRUNCATED_WEIGHTS | {"generator.max_turns": 4},
    "search_r1/run_qwen3_30b_a3b_megatron_4_turns.sh": SEARCH
    | TRUNCATED_WEIGHTS
    | engines(4, 8, memory=0.6)
    | micro(2, 1)
    | model("Qwen/Qwen3-30B-A3B")
    | under("trainer", strategy="megatron")
    | under("trainer.placement", policy_num_nodes=4)
    | under("trainer.policy.megatron_config", tensor_model_parallel_size=2, expert_model_parallel_size=8)
    | under("trainer.policy.megatron_config", expert_tensor_parallel_size=1)
    | under("trainer.ref.megatron_config", expert_model_parallel_size=8)
    | under("trainer.ref.fsdp_config", cpu_offload=False)
    | under("generator", max_turns=4),
    "swe/run_openhands_7b.sh": SWE_V0
    | under("trainer", train_batch_size=16, max_training_steps=15)
    | under("generator", n_samples_per_prompt=16)
    | under("generator.sampling_params", temperature=0.5, top_p=0.95),
    "swe/run_qwen3_8b.sh": SWE_V0
    | model("Qwen/Qwen3-8B")
    | under("trainer", max_training_steps=25)
    | under("generator.sampling_params", temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.5),
    "swe/run_qwen3_14b.sh": SWE_V0
    | engines(4, 2)
    | model("Qwen/Qwen3-14B")
    | under("trainer.algorithm", use_kl_loss=False, use_entropy_loss=True, entropy_loss_coef=0.001, eps_clip_high=0.28)
    | under("trainer", max_training_steps=35),
    "swe/run_qwen3_32b.sh": SA_SWE,
}

AGENT_OF_V0: Settings = {"prompt": 31232, "max_context_length": 32768, "max_tokens": 1536}
AGENT_OF_V0 |= {"parallel": 64, "n": 8, "top_p": 0.95}
AGENTS: dict[str, Settings] = {
    "swe/run_openhands_7b.sh": AGENT_OF_V0 | {"n": 16, "temperature": 0.5},
    "swe/run_qwen3_8b.sh": AGENT_OF_V0 | {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.5, "thinks": False},
    "swe/run_qwen3_14b.sh": AGENT_OF_V0
    | {"prompt": 31744, "max_context_length": 31744 + 3072, "max_tokens": 3072, "parallel": 192, "top_p": 1}
    | {"thinks": True, "forgets_thoughts": True},
    "swe/run_qwen3_32b.sh": {
        "prompt": 32768,
        "max_context_length": 32768,
        "steps": 50,
        "parallel": 96,
        "parallel_in_evaluation": 32,
        "n": 8,
        "n_in_evaluation": 1,
        "thinks": True,
        "keeps_thoughts": True,
        "temperature": 1,
        "top_p": 1,
        "top_k": -1,
        "evaluation": {"temperature": 0, "top_p": 0.95},
    },
}


@functools.cache
def composed(row: str) -> Any:
    """The checked settings that a row's script starts with; `row` is a script and variables of its environment."""
    script, *variables = row.split()
    given = dict(variable.split("=") for variable in variables)
    with tempfile.TemporaryDirectory() as scratch:
        (command,) = commands_of(RECIPES / script, Path(scratch), **(given or {"NUM_GPUS": "8"}))
    return checked_config(command)


@pytest.mark.parametrize("row", PUBLISHED)
def test_published_row_settings_match_script(row: str):
    config = composed(row)
    wanted = PUBLISHED[row]
    assert {name: attrgetter(name)(config) for name in wanted} == wanted
    plan = step_plan(config, num_prompts=100 * config.trainer.train_batch_size)
    updates = config.trainer.train_batch_size // config.trainer.policy_mini_batch_size
    assert plan.models[0].optimizer_steps == updates
    if row.startswith("dapo"):
        assert updates == 16  # so 160 warm-up updates are 10 steps
        assert "overlong penalty" in str(plan)


@pytest.mark.parametrize("script", [row for row in PUBLISHED if row.startswith(("dapo", "search")) and " " not in row])
def test_published_figures_are_within_bands(script: str, table: Any):
    recipe, name = script.removesuffix(".sh").split("/run_")
    expected = read_bands(composed(script).trainer.curve_bands)
    assert expected.name == f"{name}.yaml"
    row = {"search_r1": name.removeprefix("qwen2.5_3b_").replace("qwen3_30b_a3b_megatron", "30b_a3b")}.get(recipe, name)
    published = table.RECIPES[recipe].published[row]
    metrics = {"eval/all/avg_score": "score"} | {f"eval/{source}/avg_score": source for source in table.SEVEN}
    for band in expected.bands:
        _, low, high = band.points[-1]
        assert low < published[metrics[band.metric]] < high
    assert len(expected.bands) == (1 if recipe == "dapo" else 7)


@pytest.mark.parametrize("row", AGENTS)
def test_published_agent_settings_match_task_file(row: str):
    from skyrl_agent.config.task_file import load_task_file

    config = composed(row)
    task = load_task_file(config.generator.task)
    generator, dispatcher = task.generator, task.dispatcher
    found = {
        "prompt": generator.max_prompt_length,
        "max_context_length": generator.max_context_length,
        "steps": generator.max_iterations,
        "n": generator.num_trajectories,
        "n_in_evaluation": generator.val_config.num_trajectories,
        "thinks": generator.qwen3_enable_thinking,
        "keeps_thoughts": generator.qwen3_acc_thinking,
        "forgets_thoughts": generator.remove_think_tokens,
        "parallel": dispatcher.max_parallel_agents,
        "parallel_in_evaluation": dispatcher.val_config.max_parallel_agents,
        "evaluation": generator.val_config.sampling_params,
        **generator.sampling_params,
    }
    assert {name: found[name] for name in AGENTS[row]} == AGENTS[row]
    # Log-probs are those of the temperature that the tokens were drawn with.
    sampling = config.generator.sampling_params
    assert (sampling.temperature, sampling.top_p) == (found["temperature"], found["top_p"])
    assert config.generator.n_samples_per_prompt == generator.num_trajectories


def test_recipe_scripts_have_rows():
    scripts = {str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/run_*.sh")}
    without_table = {"gsm8k/run_qwen2.5_0.5b.sh", "gsm8k/run_qwen2.5_1.5b.sh"}
    named = {row.split()[0] for row in PUBLISHED} | without_table
    assert scripts - {f"{path.parent.name}/run_evaluation.sh" for path in RECIPES.glob("*/data.sh")} == named


@pytest.mark.parametrize("recipe", ["dapo", "search_r1"])
def test_unknown_figures_are_rejected(recipe: str):
    command = ["bash", str(RECIPES / recipe / "train.sh")]
    environment = {"FIGURES": "newest", "MODEL": "m", "PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "FIGURES must be table or later; got newest" in done.stderr


# ---- data


GOLDEN = json.loads((Path(__file__).parent / "recipe_prompts.json").read_text())
"""Expected values by recipe, for the real data of the test folder: rows and checksum of the builder's output, text and
token ids of the first prompt."""


def prepared(recipe: str, data: Path, spider: Path, output: Path) -> dict[str, Any]:
    """Prepare the data of a recipe that is at hand, by the builder that its data.sh calls."""
    builder, arguments = {
        "gsm8k": ("gsm8k/gsm8k_dataset.py", ["--input", data / "gsm8k/train.jsonl.gz", data / "gsm8k/test.jsonl.gz"]),
        "dapo": ("aime/aime_dataset.py", ["--only_validation", "--input", data / "math/math500.jsonl.gz"]),
        "search_r1": (
            "search/searchr1_dataset.py",
            ["--only_validation", "--input", data / "search_qa/nq_open_dev.jsonl.gz"],
        ),
        "skyrl_sql": (
            "text2sql/text2sql_dataset.py",
            ["--only_validation", "--keep_empty", "--input", data / "sql_spider/dev.jsonl.gz", "--db_path", spider],
        ),
    }[recipe]
    load_script(REPOSITORY / "examples" / builder).main(["--output_dir", str(output), *map(str, arguments)])
    written = json.loads((output / "prepared.json").read_text())
    del written["sources"]
    return written


@functools.cache
def qwen(tokenizers: Path) -> Any:
    """Qwen2.5's tokenizer with its chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizers / "qwen2.5")
    tokenizer.chat_template = (tokenizers / "chat_templates" / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    return tokenizer


def first_prompt(file: Path, tokenizers: Path) -> tuple[str, list[int]]:
    """The first row's prompt as Qwen2.5's template renders it, and its token ids."""
    prompt = pyarrow.parquet.read_table(file).slice(0, 1).to_pylist()[0]["prompt"]
    text = qwen(tokenizers).apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return text, qwen(tokenizers).encode(text, add_special_tokens=False)


@pytest.mark.parametrize("recipe", ["gsm8k", "dapo", "search_r1", "skyrl_sql"])
def test_prepared_data_and_first_prompt_are_unchanged(recipe: str, test_data, spider: Path, tmp_path: Path):
    """A changed prompt makes other figures: whoever changes one changes this file with it."""
    golden = GOLDEN[recipe]
    assert prepared(recipe, test_data, spider, tmp_path) == golden["files"]
    text, ids = first_prompt(tmp_path / next(iter(golden["files"])), test_data / "tokenizers")
    assert text == golden["first_prompt"]
    assert ids == golden["token_ids"]


# ---- tables


def answers_of(**tasks_of_sources: list[list[float]]) -> dict[str, dict[str, list[float]]]:
    return {
        source: {str(number): scores for number, scores in enumerate(tasks)}
        for source, tasks in tasks_of_sources.items()
    }


@pytest.fixture(scope="module")
def table() -> Any:
    module = load_script(RECIPES / "table.py")
    yield module


def test_aime_figures_of_three_problems(table: Any):
    """Three problems, two answers each: both right, one right, none."""
    figures = table.aime_figures(answers_of(aime=[[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]))
    assert {name: figure.mean for name, figure in figures.items()} == {
        "pass@2": pytest.approx(2 / 3),
        "mean@2": 0.5,
        "score": 0.0,
    }
    for figure in figures.values():
        assert figure.low < figure.mean < figure.high


def test_mean_of_sources_weights_sources_equally(table: Any):
    """1 of 2 and 3 of 4: means 0.5 and 0.75, variances 0.25 / 2 and 0.1875 / 4."""
    figures = table.accuracy_by_source(["a", "b", "unseen"])(
        answers_of(a=[[1.0], [0.0]], b=[[1.0], [1.0], [-1.0], [1.0]])
    )
    assert (figures["a"].mean, figures["b"].mean, figures["unseen"]) == (0.5, 0.75, None)
    assert figures["mean"].mean == 0.625
    margin = 1.959964 * ((0.25 / 2 + 0.1875 / 4) / 4) ** 0.5
    assert figures["mean"].high - 0.625 == pytest.approx(margin, rel=1e-6)


def test_published_figures_are_consistent(table: Any):
    """A score s of answers worth 1 or -1 is a mean of (s + 1) / 2; the mean of sets is the mean of their figures."""
    dapo = table.RECIPES["dapo"].published
    assert dapo["qwen2.5_math_7b"] == {"pass@32": 0.633, "mean@32": 0.348, "score": -0.304}
    for row in dapo.values():
        assert row["score"] == pytest.approx(2 * row["mean@32"] - 1, abs=1e-4)
    for recipe, tolerance in (("skyrl_sql", 0.0006), ("search_r1", 0.0006)):
        for name, row in table.RECIPES[recipe].published.items():
            own = [value for source, value in row.items() if source != "mean"]
            if name == "30b_a3b_4_turns":  # published as 0.457
                assert sum(own) / len(own) == pytest.approx(0.4306, abs=tolerance)
                continue
            assert row["mean"] == pytest.approx(sum(own) / len(own), abs=tolerance), name


def test_table_shows_published_ours_and_interval(table: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "dumped_evals" / "eval_only"
    folder.mkdir(parents=True)
    rows = [
        {
            "input_prompt": f"problem {number // 2}",
            "score": 1.0 if number == 0 else -1.0,
            "failure": "infrastructure: gone" if number == 3 else None,
            "env_extras": {"extra_info": {"index": number // 2}},
            "data_source": "math_dapo",
        }
        for number in range(4)
    ]
    (folder / "math_dapo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "aggregated_results.jsonl").write_text("{}\n")
    assert table.main(["dapo", "qwen2.5_math_7b", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| mean@2 |  | 0.250 |" in printed  # 1 of 2, and 0 of the one that did not fail
    assert "| pass@32 | 0.633 | not measured |" in printed
    assert "1 answers failed and are in no figure." in printed
    cells = json.loads((tmp_path / "table.json").read_text())
    assert cells["figures"][0] == {"name": "pass@32", "published": 0.633, "ours": None}
    with pytest.raises(FileNotFoundError, match=r"run_evaluation\.sh"):
        table.main(["dapo", "qwen2.5_math_7b", str(tmp_path / "nowhere")])


def test_agent_table_uses_last_attempt_of_each_trajectory(table: Any, tmp_path: Path):
    tries = [("a", 0, None), ("a", 0, 1.0), ("b", 1, 0.0), ("c", 2, None)]
    records = [
        {"instance_id": name, "position": position, "trajectory_id": 0, "reward": reward, "data_source": "swe-bench"}
        for name, position, reward in tries
    ]
    file = tmp_path / "swe.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    answers, num_failed = table.read_answers(file)
    assert (answers, num_failed) == ({"swe-bench": {"a": [1.0], "b": [0.0]}}, 1)


# ---- evaluation commands, with a real tiny model


ROWS_OF_A_SET = 3
EVALUATIONS = {
    "gsm8k": (["| openai_gsm8k |"], 1),
    "dapo": (["| pass@2 |", "| mean@2 |", "| score |"], 1),
    "search_r1": (["| searchR1_nq | 0.449 |", "| searchR1_popqa | 0.444 | not measured |", "| mean | 0.421 |"], 1),
    "skyrl_sql": (["| spider_dev | 0.824 |", "| spider_dk | 0.705 |", "| spider_dk | 0.720 |"], 2),
}


@pytest.mark.process
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=pytest.mark.full if recipe != "search_r1" else pytest.mark.slow)
        for recipe in EVALUATIONS
    ],
)
def test_evaluation_command_fills_table(recipe: str, test_data: Path, spider: Path, tmp_path: Path):
    sets = {"skyrl_sql": ["spider_dev", "spider_dk"]}.get(recipe, [""])
    for name in sets:
        prepared(recipe, test_data, spider, tmp_path / "data" / name)
        file = tmp_path / "data" / name / "validation.parquet"
        rows = pyarrow.parquet.read_table(file).slice(0, ROWS_OF_A_SET).to_pylist()
        source = {"search_r1": "searchR1_nq", "skyrl_sql": name}.get(recipe)
        rows = [row | ({"data_source": source} if source else {}) for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    environment = {
        "MODEL": str(test_data / "tiny_lm" / "stories260K"),
        "ROW": {"search_r1": "3_turns", "skyrl_sql": "multi"}.get(recipe, "stories"),
        "SETS": " ".join(sets),
        "MAX_TURNS": "3",
        "DATA_DIR": str(tmp_path / "data"),
        "DB_PATH": str(spider),
        "OUTPUT": str(tmp_path / "evaluations"),
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "INFERENCE_BACKEND": "native",
        "NUM_GPUS": "1",
    }
    settings = [
        "trainer.placement.launcher=inline",
        "trainer.bf16=false",
        "generator.model_dtype=float32",
        "+trainer.policy.model_config_kwargs.max_position_embeddings=8192",
        "generator.sampling_params.max_generate_length=8",
        f"trainer.run_dir={tmp_path / 'run'}",
        *(["generator.eval_n_samples_per_prompt=2"] if recipe == "dapo" else []),
    ]
    command = ["bash", str(RECIPES / recipe / "run_evaluation.sh"), *settings]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    beginnings, num_tables = EVALUATIONS[recipe]
    for beginning in beginnings:
        assert beginning in done.stdout
    assert done.stdout.count("95 % interval") == num_tables


@pytest.fixture
def served_model(test_data: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Name and address of a tiny model behind the server that the evaluation of agents names."""
    model = str(test_data / "tiny_lm" / "stories260K")
    settings = ["trainer.placement.device=cpu", "trainer.placement.launcher=inline", "generator.backend=native"]
    settings += ["generator.model_dtype=float32", "generator.http_endpoint_port=0"]
    settings += ["+trainer.policy.model_config_kwargs.max_position_embeddings=32768"]
    settings += [f"trainer.policy.model.path={model}", f"trainer.run_dir={tmp_path / 'server'}"]
    command = [sys.executable, "-m", "skyrl_train.entrypoints.serve", *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield model, server.stdout.readline().split()[-1].removesuffix("/v1")
        finally:
            server.terminate()


@pytest.mark.process
@pytest.mark.full
@pytest.mark.timeout(600)
def test_agent_evaluation_command_fills_table(served_model: tuple[str, str], test_data: Path, tmp_path: Path):
    """Two programs of QuixBugs in local sandboxes: the rows of the table have container images."""
    data, (model, address) = tmp_path / "data", served_model
    source = test_data / "swe" / "quixbugs.jsonl.gz"
    builder = load_script(REPOSITORY / "examples/agent/swe/swe_dataset.py")
    builder.main(["--output_dir", str(data), "--input", str(source), "--validation_share", "0.1"])
    rows = pyarrow.parquet.read_table(data / "validation.parquet").slice(0, 2).to_pylist()
    rows = [row | {"data_source": "swe-bench"} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data / "validation.parquet")
    environment = {"MODEL": model, "API_URL": address, "ROW": "miniature", "DATA_DIR": str(data)}
    environment |= {"OUTPUT": str(tmp_path / "evaluations"), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(RECIPES / "swe" / "run_evaluation.sh")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rollout_metrics/avg_turn_assistant: 1" in done.stdout and "2 of 2 trajectories are scored" in done.stdout
    assert "| swe-bench |  | 0.000 | 0.000 to 0.842 | 2 |" in done.stdout
