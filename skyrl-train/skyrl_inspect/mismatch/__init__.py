"""Mismatch between the log-probs of a rollout engine and of the trainer on the same tokens, and its causes.

`answers` asks an engine (`process`: in a process of its own), `scoring` asks the trainer's model, `gap` compares,
`explanations` and `findings` say what it means, `report` puts it together and `page` prints it.
"""
