"""`python -m tx_conformance`: run the checks and print a table; exit status 1 if any check failed."""

import argparse
import logging
import os
import sys
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tx_conformance", description="Check a server against the protocol."
    )
    parser.add_argument("--base-url", required=True, help="without /api/v1")
    parser.add_argument("--model", required=True, help="base model, as the server names it")
    parser.add_argument("--tokenizer", help="folder or hub name; default: what the server says")
    parser.add_argument("--vocab-size", type=int, help="token ids below it may be sent; default: the tokenizer's")
    parser.add_argument("--api-key", default=os.environ.get("TINKER_API_KEY", "tml-contract"))
    parser.add_argument("--second-api-key", help="another tenant's, for the checks of isolation")
    parser.add_argument("--only", nargs="*", default=[], help="checks whose id has one of these words in it")
    parser.add_argument("--limit", type=float, default=120, help="seconds a check may take")
    parser.add_argument("--exit-first", action="store_true", help="stop at the first check that fails")
    parser.add_argument("--list", action="store_true", help="print the checks and run none")
    parser.add_argument("--json", type=Path, help="write the verdicts there")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    logging.disable(logging.WARNING)  # what the SDK says of retries is no part of the table
    import tinker  # pyright: ignore[reportMissingImports]

    from tx_conformance import runner
    from tx_conformance.server import ServerUnderTest, Target

    if options.list:
        for check in runner.chosen(options.only):
            print(f"{check.id:<52} {check.claim}")
        return 0
    target = Target(
        options.base_url.rstrip("/"),
        options.model,
        options.api_key,
        options.second_api_key,
        options.tokenizer,
        options.vocab_size,
    )
    print(f"tinker {tinker.__version__} against {target.base_url}, model {target.model}")
    verdicts = runner.run_checks(ServerUnderTest(target), options.only, options.limit, sys.stdout, options.exit_first)
    print(runner.summary(verdicts))
    if options.json:
        runner.write_json(verdicts, options.json, tinker=tinker.__version__, base_url=target.base_url)
    sys.stdout.flush()
    return int(any(verdict.outcome == "fail" for verdict in verdicts))


if __name__ == "__main__":
    status = main()
    os._exit(status)  # threads of checks that never ended, and the SDK's own, are not waited for
