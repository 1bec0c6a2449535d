"""Tutorial 101: a first run of reinforcement learning, and the files that it leaves.

python examples/tutorials/101_first_run.py
"""

from tiny_run import digit_rows, prepare, print_curve, settings, write_rows

from skyrl_train.entrypoints.main_base import run_experiment

# A run needs four things. A model: this one has 0.1 million random weights and knows nothing.
folder = prepare("101")

# Prompts: rows with chat messages, here "write 0" to "write 63".
write_rows(folder, digit_rows())

# An environment: it reads the model's text and returns a reward. `digits` (in tiny_run.py) pays the share of digits.
# Nothing else tells the model what a digit is. Tutorial 102 is about environments.

# Settings: `key=value`, by the names in docs/configuration.md. A step asks 8 prompts, draws 8 answers to each, compares
# each answer's reward with the mean of its group (GRPO), and makes the better ones likelier.
cfg = settings(folder, "environment.env_class=digits", "trainer.max_training_steps=12")

# Train: generate, reward, update the model, give its new weights to the engine; 12 times.
run_experiment(cfg)

# The run folder has all of it: metrics.jsonl (a line a step), trajectories (each answer with its tokens, log-probs and
# reward), config.yaml (every setting), logs.
rewards = print_curve(cfg.trainer.run_dir)

# In the dashboard, "Reward" rises and "Entropy" falls as the model makes up its mind. Under "Steps", the answers of
# step 1 are noise and those of step 12 have many digits; a click on one shows how likely each token was.
print(f"look closer: python -m skyrl_train.dashboard {cfg.trainer.run_dir}")
