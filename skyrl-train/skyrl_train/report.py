"""`python -m skyrl_train.report` of earlier releases: names the command that shows runs now."""

import sys

if __name__ == "__main__":
    sys.exit("the dashboard shows runs: python -m skyrl_train.dashboard RUN (in a terminal: --terminal RUN)")
