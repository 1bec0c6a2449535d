"""Mismatch between the log-probs of a rollout engine and of the trainer on the same tokens, and its causes.

`answers` queries an engine (`process`: in a separate process), `scoring` queries the trainer's model, `gap` compares,
`explanations` and `findings` interpret, `report` collects and `page` prints.
"""
