"""Run a task file's agent on dataset rows with the model of any OpenAI-compatible server: `python -m
skyrl_agent.evaluate`.

python examples/agent/run_openai.py examples/agent/search/search.yaml ~/data/agent_search/validation.parquet --limit 20
"""

import sys

from skyrl_agent.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
