"""Chat layer of all packages: chat templates, token ids of messages, tool calls in a model's text.

Independent of environments, engines and agents; a tokenizer is passed in.
"""
