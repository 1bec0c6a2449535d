"""How far a rollout engine's log-probs are from the trainer's, on the same tokens, and why.

`answers` asks an engine (`process`: in a process of its own), `scoring` asks the trainer's model, `gap` compares,
`explanations` and `findings` say what it means, `report` puts it together and `page` prints it.
"""
