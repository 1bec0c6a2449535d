"""HTTP server over the engines in the protocols of OpenAI and Anthropic, and the recorder of agents' requests."""
