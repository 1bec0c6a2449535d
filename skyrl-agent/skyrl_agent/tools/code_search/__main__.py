"""`python -m skyrl_agent.tools.code_search --root FOLDER --search_terms NAME`."""

from skyrl_agent.tools.code_search.engine.cli import main

raise SystemExit(main())
