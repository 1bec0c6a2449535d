"""Every program of tinker-cookbook's recipes, for a few steps each: which of them run against this server.

    python every_recipe.py PLAYGROUND [--only WORD ...] [--table FILE]      (in an environment with tinker-cookbook)

The server's address and key come from TINKER_BASE_URL and TINKER_API_KEY. It serves the names of `SERVED`, and with
`--stable-reinforce-as importance_sampling`, as many recipes have no option for their loss. Each program is a process
forked from one that has imported the libraries, which is seconds cheaper than a start.
"""

import argparse
import os
import re
import runpy
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

M = "Qwen/Qwen3-8B-Base"
SERVED = (M, "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3-8B")
SECONDS = 420

LOG = "log_path={log} behavior_if_log_dir_exists=delete"
SL = f"model_name={M} {LOG} batch_size=4 lora_rank=4 max_length=256 max_steps=2"
RL = f"model_name={M} {LOG} group_size=4 max_tokens=8 max_steps=2"
MATH = f"{RL} lora_rank=4 groups_per_batch=4 eval_every=0"
GAME = f"model_name={M} {LOG} batch_size=4 max_tokens=8 max_steps=1 eval_every=0"
SWEEP = f"recipe=sft base.model_name={M} base.batch_size=4 base.max_length=256 base.eval_every=0 max_parallel=1"
SWEEP += " sweep_dir={log} training_budget_examples=8 learning_rates=[1e-4,1e-3] lora_ranks=[4]"
LOSSES = ("importance_sampling", "cispo", "gspo")
TEACHERS = f"deepmath_teacher_model={M} tulu3_teacher_model={M}"
RL_LOOP = f"model_name={M} log_path={{log}} batch_size=4 group_size=4 lora_rank=4 max_tokens=8 max_steps=2"
PAGES = "task.page_chars=200 renderer_name=qwen3_5_disable_thinking"
REASONING = "buffer_size=16 max_prompts=40"
AUDIO = "asr.sl_train asr.rl_train emotion.sl_train emotion.rl_train emotion.prepare_data emotion.evaluate"
AUDIO += " medical_asr.train"
STREAM = "stream_minibatch_config.groups_per_batch=4 stream_minibatch_config.num_minibatches=2"
RLHF = f"base_model={M} lora_rank=4 max_length=256 batch_size=4 rl_max_tokens=8 max_steps=1 eval_every=0"
PROMPT = f"model_name={M} {LOG} file_path=distilled.jsonl batch_size=4 lora_rank=4 max_length=512 num_epochs=1"
RUBRIC = f"model_name={M} {LOG} lora_rank=4 train_group_size=2 groups_per_batch=4 max_tokens=8 max_steps=1 eval_every=0"
DISTILL = f"model_name={M} {LOG} lora_rank=4 group_size=2 max_tokens=8 max_steps=1 eval_every=0 save_every=0"


@dataclass(frozen=True)
class Run:
    """A command, and the end that is expected of it."""

    module: str
    arguments: str = ""
    needs: str = ""
    """What this machine has not, so that the program cannot end well; empty: exit status 0 is expected."""
    shows: str = ""
    """Expression that its output has then."""
    stdin: str = ""

    @property
    def title(self) -> str:
        return f"{self.module} {self.arguments}".strip()


_NO_DATA = r"DatasetNotFound|OfflineMode|ConnectionError|ConnectError|LocalEntryNotFound|Couldn't (find|reach)|URLError"
_MODAL = ("the package modal and its sandbox", "modal is required|No module named 'modal'")
_IMAGES = {"needs": "images", "shows": rf"{_NO_DATA}|base_model must be|model_path must be"}
_AUDIO = {
    "needs": "audio",
    "shows": rf"{_NO_DATA}|No module named '(soundfile|jiwer)'|base_model must be|ffmpeg is required",
}


def absent(package: str) -> dict[str, str]:
    return {"needs": f"the package {package}", "shows": rf"No module named '{package}|{package} is required"}


RUNS = (
    Run("sl_basic", f"model_name={M} log_path={{log}} max_steps=1 eval_every=0"),
    Run("rl_basic", f"model_name={M} log_path={{log}} max_steps=1 max_tokens=8"),
    Run("sl_loop", f"model_name={M} log_path={{log}} batch_size=4 lora_rank=4 max_length=256 max_steps=2"),
    *(Run("rl_loop", RL_LOOP + loss) for loss in ("", *(f" loss_fn={name}" for name in LOSSES))),
    Run("chat_sl.train", f"{SL} eval_every=0"),
    Run("chat_sl.train", f"{SL} eval_every=0 dataset=tulu3"),
    Run("chat_sl.train", f"{SL} eval_every=0 dataset=conversations.jsonl"),
    *(Run("math_rl.train", f"{MATH} env={env}") for env in ("arithmetic", "gsm8k", "deepmath", "polaris", "math")),
    Run("math_rl.train", f"{MATH} env=arithmetic loss_fn=ppo num_substeps=2"),
    Run("math_rl.train", f"{MATH} env=arithmetic max_steps_off_policy=1"),
    Run("math_rl.train", f"{MATH} env=arithmetic {STREAM}"),
    Run("chat_sl.sweep", SWEEP),
    Run("preference.dpo.train", f"model_name={M} {LOG} dataset=hhh batch_size=4 max_length=128 max_steps=2"),
    Run("preference.shorter.train", f"{GAME} group_size=4"),
    Run("preference.rlhf.rlhf_pipeline", RLHF),
    Run("prompt_distillation.create_data", "output_file=distilled.jsonl"),
    Run("prompt_distillation.train", PROMPT),
    Run("distillation.off_policy_reasoning", f"{SL} renderer_name=role_colon eval_every=0 {REASONING}"),
    *(
        Run("distillation.on_policy_distillation", f"{DISTILL} groups_per_batch=4 teacher_model={M} dataset={data}")
        for data in ("deepmath", "tulu3")
    ),
    Run(
        "distillation.on_policy_multi_teacher",
        f"{DISTILL} deepmath_groups_per_batch=2 tulu3_groups_per_batch=2 {TEACHERS}",
    ),
    Run("multiplayer_rl.guess_number.train", f"{GAME} group_size=4"),
    Run("multiplayer_rl.twenty_questions.train", f"{GAME} group_size=2"),
    Run("rubric.generate_data"),
    Run("rubric.debug_env"),
    Run("rubric.train", RUBRIC),
    Run("rl_numerics_check.train", f"{MATH} save_every=0 {PAGES}"),
    Run("sdft.train", f"{DISTILL} groups_per_batch=4 topk=4"),
    Run("sdft.run_continual_learning", "dry_run=True"),
    Run("true_thinking_score.analyze", f"model_name={M} dataset=gsm8k n_problems=2 max_tokens=32 log_path={{log}}"),
    Run("true_thinking_score.run_small_experiment"),
    Run("decisions.demo", f"model_name={M}", stdin="How do I choose a learning rate?\n\n"),
    Run("rubric.prometheus_experimental", f"model_name={M} {LOG} max_steps=1", "its data set", _NO_DATA),
    Run("sdft.benchmark", f"model_name={M}", "its data set", rf"{_NO_DATA}|not found|No such file"),
    Run("forecasting.data", "", "its data set", _NO_DATA),
    Run("forecasting.train", f"model_name={M} renderer_name=role_colon {LOG}", "its data set", _NO_DATA),
    Run("decisions.forecasting", f"model_name={M} log_path={{log}}", "its data set", _NO_DATA),
    Run("code_rl.train", f"{RL} groups_per_batch=4", "its data set and SandboxFusion", rf"{_NO_DATA}|aiohttp"),
    Run("multiplayer_rl.text_arena.train", GAME, **absent("textarena")),
    Run("multiplayer_rl.text_arena.play", f"model_name={M}", **absent("textarena")),
    Run("verifiers_rl.train", f"{RL} groups_per_batch=4", **absent("verifiers")),
    Run("verifiers_rl.evaluate", f"model_name={M}", **absent("verifiers")),
    Run("search_tool.train", RL, **absent("chromadb")),
    Run("search_tool.offline_eval", "tinker_checkpoint_url=tinker://none", **absent("chromadb")),
    Run("harbor_rl.scripts.train_terminal_bench", "", *_MODAL),
    Run("harbor_rl.scripts.eval_harbor_rl", f"model_name={M}", *_MODAL),
    Run("distillation.on_policy_distillation_harbor_multi_turn", f"model_name={M}", *_MODAL),
    Run("vlm_classifier.train", "experiment_dir={log} behavior_if_log_dir_exists=delete", **_IMAGES),
    Run("vlm_classifier.eval", "dataset=caltech101 model_path=tinker://none", **_IMAGES),
    *(Run(f"audio.{name}", "", **_AUDIO) for name in AUDIO.split()),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    run: Run
    status: int
    seconds: float
    last_line: str
    as_expected: bool


def execute(run: Run, number: int, playground: Path) -> Result:
    """Run a program in a fork of this process, at most `SECONDS` long."""
    folder = playground / "every" / f"{number:02d}"
    shutil.rmtree(folder, ignore_errors=True)  # a recipe would go on from what is there
    folder.mkdir(parents=True)
    start, log = time.monotonic(), folder / "log.txt"
    (folder / "stdin").write_text(run.stdin)
    child = os.fork()
    if not child:
        _become(run, folder, playground, log)
    status = None
    while status is None and time.monotonic() - start < SECONDS:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.05)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        status = -signal.SIGKILL
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    good = status != 0 and bool(re.search(run.shows, text)) if run.needs else status == 0
    return Result(run, status, time.monotonic() - start, lines[-1][:200], good)


def _become(run: Run, folder: Path, playground: Path, log: Path) -> None:
    """Run the program in this process, and end it with the program's status."""
    status = 1
    try:
        os.chdir(playground)
        os.environ["TINKER_COOKBOOK_RUNS_DIR"] = str(folder / "runs")
        for number, path, flags in (
            (0, folder / "stdin", os.O_RDONLY),
            (1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ):
            os.dup2(os.open(path, flags, 0o644), number)
        os.dup2(1, 2)
        module = f"tinker_cookbook.recipes.{run.module}"
        sys.argv = [module, *run.arguments.format(log=folder / "run").split()]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads of the SDK would be waited for, and this process's own exit handlers would run


def prepare(playground: Path) -> None:
    """Import what all programs need, and add data and names to the playground."""
    import datasets  # noqa: F401
    import tinker_cookbook.preference.train_dpo
    import tinker_cookbook.rl.train
    import tinker_cookbook.supervised.train  # noqa: F401
    import torch
    from more_data import write_more_data

    torch.set_num_threads(1)
    write_more_data(playground)
    for name in SERVED:
        if not (playground / name).exists():
            (playground / name).symlink_to((playground / M).resolve())


def row_of(result: Result) -> str:
    run = result.run
    arguments = " ".join(word for word in run.arguments.split() if not re.match(r"model_name|log_path|behavior", word))
    outcome = f"needs {run.needs}" if run.needs else f"exit status {result.status}, {result.seconds:.0f} s"
    return f"| `{run.module}` | {f'`{arguments}`' if arguments else ''} | {outcome} |"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("playground", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TINKER_TELEMETRY": "0"}
    playground, table = options.playground.resolve(), options.table and options.table.resolve()
    os.environ["HF_DATASETS_CACHE"] = str(playground / ".datasets")
    os.chdir(playground)  # where libraries look for what is named as on the hub
    prepare(playground)
    results = []
    for number, run in enumerate(RUNS):
        if options.only and not any(word in f"{number} {run.title}" for word in options.only):
            continue
        results.append(result := execute(run, number, playground))
        print(f"{'ok' if result.as_expected else 'FAIL':<5}{number:3d} {result.seconds:4.0f} s  {run.title[:110]}")
        if not result.as_expected:
            print(f"      status {result.status}: {result.last_line}")
        sys.stdout.flush()
        if table:
            rows = "\n".join(map(row_of, results))
            table.write_text(f"| program | options | result |\n|---|---|---|\n{rows}\n")
    return int(not all(result.as_expected for result in results))


if __name__ == "__main__":
    sys.exit(main())
