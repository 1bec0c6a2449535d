"""The README's experiment: its code blocks, written to files, train a tiny model for a step."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_readme_experiment_trains_with_custom_loss_and_hook(tmp_path: Path, chat_model: str):
    section = (ROOT / "README.md").read_text().split("## Write an experiment")[1].split("\n## ")[0]
    environment, loss, agent, hook, train = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "my_experiment.py").write_text("\n\n".join([environment, loss, hook]))
    compile(agent, "my_agent.py", "exec")
    (tmp_path / "train.py").write_text(train)
    row = {
        "prompt": [{"role": "user", "content": "ab"}],
        "env_class": "count_vowels",
        "reward_spec": {"method": "rule", "ground_truth": "a"},
    }
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    [command] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    _, _, script, *settings = shlex.split(command.replace("\\\n", " "))
    settings += [
        f"trainer.policy.model.path={chat_model}", "data.train_data=[train.jsonl]", "data.val_data=[]",
        "trainer.placement.device=cpu", "trainer.placement.launcher=inline", "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2", "trainer.max_training_steps=1", "trainer.eval_interval=-1",
        "trainer.ckpt_interval=-1", "trainer.run_dir=run", "trainer.logger=console", "trainer.bf16=false",
        "trainer.algorithm.use_kl_loss=false", "trainer.algorithm.advantage_estimator=grpo",
        "trainer.max_prompt_length=64", "generator.sampling_params.max_generate_length=8",
        "generator.n_samples_per_prompt=2", "generator.backend=native",
    ]  # fmt: skip
    finished = subprocess.run(
        [sys.executable, script, *settings], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    [step] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["reward/per_token"] == step["reward/avg_raw_reward"] / step["generate/avg_num_tokens"]
