"""Miniatures of recipes under examples/recipes: settings that differ from the recipe's are named here and no others do;
problems, demonstrations and comparisons are checked by hand; the smallest run of each goes from end to end.
"""

import dataclasses
import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from composed_scripts import checked_config, commands_of

from skyrl_gym.envs.aime.env import AIMEEnv
from skyrl_inspect.curve_bands import read_bands
from skyrl_train.config import compose_config, validate_cfg
from skyrl_train.config.supervised import SupervisedConfig
from skyrl_train.config.validation import validate_supervised_cfg
from skyrl_train.entrypoints.main_distill import DEFAULTS

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = REPOSITORY / "examples" / "recipes"


def load(recipe: str) -> Any:
    """Import a recipe's miniature, that of "distillation", or `miniatures` itself."""
    folder = RECIPES / recipe if recipe != "distillation" else REPOSITORY / "examples" / "on_policy_distillation"
    path = folder / "miniature.py" if recipe else RECIPES / "miniatures.py"
    name = f"{recipe}_miniature" if recipe else "miniatures"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MACHINE_AND_FILES = {
    "trainer.placement.device",
    "trainer.placement.launcher",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.ref_num_gpus_per_node",
    "trainer.placement.ref_num_nodes",
    "trainer.bf16",
    "trainer.gradient_checkpointing",
    "trainer.ckpt_interval",
    "trainer.ckpt_path",
    "trainer.curve_bands",
    "trainer.dump_data_batch",
    "trainer.export_path",
    "trainer.run_dir",
    "trainer.hf_save_interval",
    "trainer.resume_mode",
    "trainer.epochs",
    "trainer.max_training_steps",
    "trainer.seed",
    "generator.backend",
    "generator.enforce_eager",
    "generator.gpu_memory_utilization",
    "generator.max_num_batched_tokens",
    "generator.inference_engine_tensor_parallel_size",
    "generator.model_dtype",
    "generator.num_inference_engines",
    "generator.weight_sync_backend",
}
"""What a run on a CPU, in one process and without checkpoints, has otherwise."""

SIZES_OF_A_RUN = {
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.micro_forward_batch_size_per_gpu",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.max_prompt_length",
    "trainer.policy.optimizer_config.lr",
    "generator.max_input_length",
    "generator.sampling_params.max_generate_length",
    "generator.eval_sampling_params.max_generate_length",
}

MAY_DIFFER = {
    "dapo": MACHINE_AND_FILES
    | SIZES_OF_A_RUN
    | {
        "trainer.algorithm.max_seq_len",
        "trainer.algorithm.overlong_buffer.len",
        "trainer.eval_batch_size",
        "trainer.policy.fsdp_config.fsdp_size",
        "trainer.policy.optimizer_config.num_warmup_steps",
        "generator.eval_n_samples_per_prompt",
    },
    "swe": MACHINE_AND_FILES
    | SIZES_OF_A_RUN
    | {
        "trainer.algorithm.max_seq_len",
        "trainer.eval_before_train",
        "trainer.eval_interval",
        "trainer.policy.sequence_parallel_size",
        "trainer.ref.sequence_parallel_size",
        "generator.task",
    },
    "search_r1": MACHINE_AND_FILES
    | SIZES_OF_A_RUN
    | {
        "trainer.eval_before_train",
        "trainer.eval_interval",
        "trainer.policy.optimizer_config.num_warmup_steps",
        "trainer.ref.fsdp_config.cpu_offload",
        "trainer.algorithm.max_seq_len",
    },
    "skyrl_sql": MACHINE_AND_FILES
    | SIZES_OF_A_RUN
    | {"trainer.policy.optimizer_config.num_warmup_steps", "trainer.algorithm.max_seq_len"},
}
"""Settings that a miniature may have otherwise than its recipe; all others are the recipe's."""

PLAIN_GRPO = {
    "trainer.algorithm.eps_clip_high": 0.2,
    "trainer.algorithm.loss_reduction": "sequence_mean",
    "trainer.algorithm.overlong_buffer.len": None,
    "generator.apply_overlong_filtering": False,
}
"""What the arm that DAPO is compared with has otherwise."""


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return settings by their full names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, dict):
        return {name: value}
    return {
        full: one for key, each in value.items() for full, one in flat(each, f"{name}.{key}" if name else key).items()
    }


def composed(script: Path, scratch: Path, *settings: str, **variables: str) -> dict[str, Any]:
    scratch.mkdir()
    (command,) = commands_of(script, scratch, *settings, MODEL="tiny-model", **variables)
    return flat(checked_config(command))


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


@pytest.mark.parametrize("recipe", MAY_DIFFER)
def test_miniature_settings_match_recipe_except_sizes(recipe: str, tmp_path: Path):
    miniature, shared = load(recipe), load("")
    variables = {"FIGURES": "later"} if recipe == "dapo" else {}
    published = composed(miniature.SCRIPT, tmp_path / "published", NUM_GPUS="8", **variables)
    settings = [*shared.SIZES, *miniature.SETTINGS]
    small = composed(miniature.SCRIPT, tmp_path / "small", *settings, **shared.VARIABLES, **variables)
    assert different(small, published) <= MAY_DIFFER[recipe]
    updates = "trainer.train_batch_size", "trainer.policy_mini_batch_size"
    assert small[updates[0]] // small[updates[1]] == published[updates[0]] // published[updates[1]]


def test_plain_grpo_differs_from_dapo_by_four_settings(tmp_path: Path):
    miniature, shared = load("dapo"), load("")
    arms = {
        name: composed(
            miniature.SCRIPT,
            tmp_path / name,
            *(*shared.SIZES, *miniature.SETTINGS, *settings),
            **(shared.VARIABLES | {"FIGURES": "later"}),
        )
        for name, settings in miniature.ARMS.items()
    }
    names = different(arms["DAPO"], arms["plain GRPO"])
    assert {name: arms["plain GRPO"][name] for name in names} == PLAIN_GRPO
    assert arms["DAPO"]["trainer.algorithm.overlong_buffer.len"] == miniature.LIMIT // 2
    assert different(arms["DAPO"], arms["DAPO without clip-higher"]) == {"trainer.algorithm.eps_clip_high"}


def test_only_dapo_runs_are_compared_with_band(tmp_path: Path):
    miniature, shared = load("dapo"), load("")
    settings = [*shared.SIZES, *miniature.SETTINGS, *miniature.BANDS["DAPO"]]
    own = composed(miniature.SCRIPT, tmp_path / "DAPO", *settings, **shared.VARIABLES, FIGURES="later")
    expected = read_bands(own["trainer.curve_bands"])
    assert {band.metric for band in expected.bands} == {*miniature.METRICS, "reward/avg_raw_reward"}
    assert max(band.points[-1][0] for band in expected.bands) == 12
    assert set(miniature.BANDS) == {"DAPO"}


def test_swe_task_file_keeps_recipe_agent_and_tools():
    from skyrl_agent.config.task_file import load_task_file

    ours, recipe = (
        flat(load_task_file(RECIPES / "swe" / f"{name}.yaml").model_dump()) for name in ("miniature", "qwen3_32b")
    )
    assert different(ours, recipe) <= {
        "task",
        "data.instance_key",
        "data.instance_id_key",
        "generator.max_iterations",
        "generator.sampling_params.max_tokens",
        "generator.val_config.sampling_params.temperature",
        "generator.val_config.sampling_params.top_p",
        *(
            f"dispatcher.{section}{name}"
            for section in ("", "val_config.")
            for name in ("max_parallel_agents", "max_eval_parallel_agents")
        ),
        "runtime.kind",
    }


# ---- problems and demonstrations


def test_sum_strategies_have_expected_lengths_and_rewards():
    """Running totals are right and fit; additions in full are right, and too long for six numbers."""
    dapo = load("dapo")
    tokenizer, draw = dapo.make_tokenizer(), random.Random(0)
    for terms in ([3, 5, 2], [1, 2, 3, 4], [5, 4, 3, 2, 1], [1, 1, 2, 2, 3, 3]):
        env = AIMEEnv(extras={"reward_model": {"ground_truth": str(sum(terms))}})
        texts = {way: dapo.solution_of(terms, way, draw) for way in dapo.SKILLS}
        lengths = {way: len(tokenizer.encode(text, add_special_tokens=False)) + 1 for way, text in texts.items()}
        assert env.step(texts["totals"])["reward"] == env.step(texts["full"])["reward"] == 1.0
        assert lengths["totals"] <= dapo.LIMIT
        assert (lengths["full"] > dapo.LIMIT) == (len(terms) == 6)
    assert dapo.text_of([3, 5, 2]) == "a3b5c2"
    held_out = {dapo.text_of(dapo.problem_of(draw, held_out=True)) for _ in range(50)}
    assert not held_out & {dapo.text_of(dapo.problem_of(draw)) for _ in range(500)}


def test_injected_bugs_fail_tests_and_repairs_pass(tmp_path: Path):
    swe = load("swe")
    draw = random.Random(0)
    assert not set(swe.expressions(held_out=True)) & set(swe.expressions(held_out=False))
    for right in draw.sample(swe.expressions(held_out=False), 40):
        wrong, old, new = swe.mistake_in(right, draw)
        row = swe.row_of("a", right, wrong)
        # The agent's command replaces the first of these characters in the line.
        assert wrong.count(old) == 1 and wrong.replace(old, new) == right
        for expression, passes in ((wrong, False), (right, True)):
            function = eval(f"lambda w, x, y, z: {expression}")
            cases = [
                line.removeprefix("assert ") for line in row["files"]["test_f.py"].splitlines() if "assert" in line
            ]
            assert all(eval(case, {"f": function}) for case in cases) == passes


def test_two_hop_questions_need_two_searches():
    """A search for the question's subject finds the answer to one hop, and never that to two hops; a search for the
    intermediate entity finds that."""
    search = load("search_r1")
    training, evaluation = search.questions()
    assert not {question.subject for question in training} & {question.subject for question in evaluation}
    documents = search.world().documents()
    assert len(documents) == len({document["title"] for document in documents}) > 2000
    with search.RetrievalServer(documents) as server:
        shown = search.Demonstrations(server.url, {}).observation
        for question in evaluation[:60]:
            first, _ = shown(question.subject)
            assert question.chain[0] in first.partition("Doc 2")[0]
            if question.hops == 2:
                second, _ = shown(question.chain[0])
                assert question.chain[1] not in first and question.chain[1] in second.partition("Doc 2")[0]


def test_unsupported_dialect_syntax_is_reported(tmp_path: Path):
    sql = load("skyrl_sql")
    database = sql.databases()[0]
    assert len({each.db_id for each in sql.databases()}) == sql.NUM_DATABASES
    database.write(tmp_path)
    for kind in sql.KINDS:
        options = database.options(kind)
        gold = {name: ways[0] for name, ways in options.items()}
        assert "Error" not in sql._observation(tmp_path, database.db_id, database.gold(kind), 3)
        for name, ways in options.items():
            for wrong in ways[1:]:
                query = database.query(kind, gold | {name: wrong})
                assert sql.refused_part(sql._observation(tmp_path, database.db_id, query, 3)) == name, query


def test_demonstrated_repairs_replace_rejected_syntax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sql = load("skyrl_sql")
    for name, value in {"REPAIRS": 1.0, "BELIEVES": 1.0, "FORGETS": 0.0}.items():
        monkeypatch.setattr(sql, name, value)
    database = sql.databases()[0]
    database.write(tmp_path)
    row = {"db_id": database.db_id, "prompt": [], "extra_info": {"question": sql.asked(sql.KINDS[0], 6)}}
    demonstrate, draw = sql.Demonstrations([row], tmp_path), random.Random(0)
    ways = [way for own in database.options(sql.KINDS[0]).values() for way in own]
    for _ in range(20):
        *pieces, (solution, _) = demonstrate(draw).pieces
        queries, shown = [text for text, _ in pieces[::2]], [text for text, _ in pieces[1::2]]
        assert len(queries) <= 5 and len(set(queries)) == len(queries)
        for before, after, observation in zip(queries, queries[1:], shown, strict=False):
            exchanged = {way for way in ways if (way.strip("{}") in before) != (way.strip("{}") in after)}
            assert exchanged <= set(database.options(sql.KINDS[0])[sql.refused_part(observation)])
        assert len(queries) == 5 or sql.refused_part(shown[-1]) is None
        assert solution.partition("<solution>")[2].partition("<")[0] in queries[-1]


def test_single_message_demonstrations_match_rollout_tokens():
    """A prompt is encoded as its chat template is; text is decoded to what it was; observations are not learned."""
    growing_message = sys.modules[load("skyrl_sql").phrase_tokenizer.__module__]
    tokenizer = growing_message.phrase_tokenizer(["<sql>", "</sql>", "of a", "ab", "Error: …"])
    prompt = [{"role": "system", "content": "Be of a kind."}, {"role": "user", "content": "ab?"}]
    pieces = [("<sql>ab</sql>", True), ("rows of a\n", False), ("<sql>b</sql>", True)]
    ids, labels = growing_message.encode_growing_message(tokenizer, growing_message.Demonstration(prompt, pieces))
    encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    assert ids[: len(encoded)] == encoded
    assert tokenizer.decode(ids[len(encoded) :]) == "<sql>ab</sql>rows of a\n<sql>b</sql>"
    assert tokenizer.decode([label for label in labels if label != load("").IGNORED]) == "<sql>ab</sql><sql>b</sql>"
    assert len(tokenizer.encode("Error: 1\n")) == 2  # the line, whatever it says, and its end


# ---- comparisons


def test_paired_difference_interval_of_three_seeds():
    """1, 2, 3: mean 2, standard error 1 / sqrt(3), and 4.303 of it for three seeds."""
    difference = load("").Difference((1.0, 2.0, 3.0))
    assert difference.mean == 2.0
    assert difference.margin == pytest.approx(4.303 / math.sqrt(3))
    assert not difference.shows(1)  # 2 - 2.48 is below 0
    assert load("").Difference((2.0, 2.1, 2.2)).shows(1)
    assert not load("").Difference((2.0, 2.1, 2.2)).shows(-1)
    assert not load("").Difference((2.0,)).shows(1)  # no interval


# ---- the smallest run of each

FEWER_QUESTIONS = {"search_r1": ["NUM_EVALUATION"], "skyrl_sql": ["NUM_HELD_OUT"]}
"""Numbers of evaluation questions that are 1 in the smallest run."""


@pytest.mark.process
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=pytest.mark.slow if recipe == "dapo" else pytest.mark.full) for recipe in MAY_DIFFER],
)
def test_smallest_miniature_runs_end_to_end(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name in FEWER_QUESTIONS.get(recipe, ()):
        monkeypatch.setattr(load(recipe), name, 1)
    arguments = ["--seeds", "0", "--steps", "1", "--warm_up_steps", "4", "--output", str(tmp_path / "runs")]
    load(recipe).main(arguments)
    printed = capsys.readouterr().out
    assert "one seed: no interval" in printed and "nan" not in printed
    assert (tmp_path / "runs" / "curves.png").read_bytes().startswith(b"\x89PNG")
    files = [file for file in (tmp_path / "runs" / "0").glob("*/metrics.jsonl") if file.parent.name != "evaluations"]
    assert len(files) == {"dapo": 3, "swe": 1, "search_r1": 2, "skyrl_sql": 2}[recipe]
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert math.isfinite(rows[-1]["reward/avg_raw_reward"])
        assert math.isfinite(rows[-1]["policy/final_loss"])
    before = [file.stat().st_mtime_ns for file in files]
    load(recipe).main(arguments)  # complete: not repeated
    assert [file.stat().st_mtime_ns for file in files] == before


# ---- distillation


def test_distillation_arms_train_same_student(tmp_path: Path):
    miniature = load("distillation")
    supervised, fresh, distilled = (
        miniature.settings_of(tmp_path / "seed_0", arm, 48, 0) for arm in ("sft", "sft_fresh", "full")
    )
    ours, theirs = (
        flat(validate_supervised_cfg(compose_config(arm, SupervisedConfig), SupervisedConfig))
        for arm in (supervised, fresh)
    )
    files = {"data.train_data", "trainer.run_dir", "trainer.ckpt_path", "trainer.export_path"}
    assert different(ours, theirs) - {"trainer.run_name"} == files
    own = flat(validate_cfg(compose_config(distilled, changes=DEFAULTS)))
    assert own["trainer.distillation.teachers.main.model"] == str(tmp_path / "teacher")
    same = {name for name in own if name.startswith("trainer.policy.")} | {"trainer.train_batch_size", "trainer.seed"}
    assert not different(own, ours) & (same | {"trainer.max_training_steps"})
    assert own["trainer.policy_mini_batch_size"] == own["trainer.train_batch_size"]  # one update a step, as in `sft`


def test_distillation_teacher_learns_only_corrections():
    miniature = load("distillation")
    tokenizer, draw = miniature.make_tokenizer(), random.Random(0)
    demonstrations = [miniature.demonstrate(draw, ["57+48"], corrected=1.0) for _ in range(200)]
    texts = ["".join(text for text, _ in parts[1:]) for parts in demonstrations]
    assert {text.split("<answer>")[1] for text in texts} == {f"105</answer>{miniature.END}"}
    assert "7+8=15,5+4+1=10" in {text.split("<answer>")[0] for text in texts}
    for parts, text in zip(demonstrations, texts, strict=True):
        errors = [part for part, is_error in parts if is_error]
        assert text.count("!") == len(errors)
        ids, labels = miniature.encode(tokenizer, parts, learns_errors=False)
        learned = tokenizer.decode([label for label in labels if label != miniature.IGNORED])
        assert len(learned) == len(text) - sum(map(len, errors))
        assert tokenizer.decode(ids).endswith(text)
    uncorrected = [miniature.demonstrate(draw, ["57+48"], corrected=0.0) for _ in range(200)]
    assert any("7+8=13,5+4+1=" in "".join(text for text, _ in parts) for parts in uncorrected)
    ids, labels = miniature.encode(tokenizer, uncorrected[0], learns_errors=True)
    assert labels[-1] == ids[-1] and labels.count(miniature.IGNORED) == len(
        miniature.prompt_ids(tokenizer, [{"role": "user", "content": "57+48"}])
    )


def test_curve_is_interpolated_at_equal_tokens():
    miniature = load("distillation")
    curve = [{"step": 0.0, miniature.RIGHT: 0.1}, {"step": 100.0, miniature.RIGHT: 0.3}]
    assert miniature.at(curve, 50.0) == pytest.approx(0.2)
    assert miniature.at(curve, 120.0) == 0.3


@pytest.mark.full
def test_smallest_distillation_miniature_runs_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--seeds", "0", "--steps", "1", "--warm_up_steps", "4", "--output", str(tmp_path)]
    load("distillation").main(arguments)
    printed = capsys.readouterr().out
    assert "one seed: no interval" in printed and "nan" not in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    files = sorted((tmp_path / "seed_0").glob("*/metrics.jsonl"))
    assert [file.parent.name for file in files] == ["full", "sft", "sft_fresh"]
    before = [file.stat().st_mtime_ns for file in files]
    load("distillation").main(arguments)  # complete: not repeated
    assert [file.stat().st_mtime_ns for file in files] == before
