"""Chat layer of all packages: chat templates, token ids of messages, tool calls in a model's text.

Knows no environment, engine or agent; a tokenizer is handed in.
"""
