"""Tutorial 107: training of an adapter (LoRA), checkpoints, stopping and resuming a run, and export.

python examples/tutorials/107_adapter_and_resume.py
"""

import random
import string

from tiny_run import digit_rows, prepare, print_curve, settings, train_on_demonstrations, write_rows

from skyrl_train.entrypoints.main_base import run_experiment
from skyrl_train.utils.run_folder import RunFolder

# Adapters are for models that can do something already: this one is first shown strings of digits, or of letters.
folder, draw = prepare("107"), random.Random(0)
write_rows(folder, digit_rows())
kinds = [string.digits, string.ascii_lowercase, string.ascii_uppercase]
texts = ["".join(draw.choices(draw.choice(kinds), k=8)) for _ in range(512)]
rows = zip(8 * digit_rows(), texts, strict=True)
shown = [[*row["prompt"], {"role": "assistant", "content": text}] for row, text in rows]
model = train_on_demonstrations(folder, shown, steps=60)

# `lora.rank` trains two thin matrices beside each layer and leaves the model as it is: less memory for gradients and
# optimizer, and adapters of a few megabytes to keep.
adapter = [
    f"trainer.policy.model.path={model}",
    "trainer.policy.model.lora.rank=8",
    "trainer.policy.optimizer_config.lr=3e-3",
]

# A checkpoint every 5 steps: weights, optimizer, random states, the place in the data.
kept = ["trainer.ckpt_interval=5", "trainer.hf_save_interval=20"]


def train(num_steps: int) -> str:
    cfg = settings(folder, "environment.env_class=digits", *adapter, *kept, f"trainer.max_training_steps={num_steps}")
    run_experiment(cfg)
    return cfg.trainer.run_dir


# This one ends after 10 of 20 steps, as if the machine had been taken away.
run_dir = train(10)

# The same command goes on at step 11 (`resume_mode=latest` is the default), on a CPU to the bit as if nothing had
# happened: `python -m skyrl_train.diff A B` would say so. A finished run says that it is finished.
train(20)
steps = [row["step"] for row in RunFolder(run_dir).read_metrics()]
rewards = print_curve(run_dir)
print("steps:", steps)

# The export at step 20 is an adapter in peft's format, for transformers, vLLM or `main_generate`.
exported = sorted(path.name for path in (RunFolder(run_dir).path / "exports" / "global_step_20").rglob("*.*"))
print("exported:", exported)
