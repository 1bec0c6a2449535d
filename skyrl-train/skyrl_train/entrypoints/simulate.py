"""`python -m skyrl_train.entrypoints.simulate RUN`: see `skyrl_train.rollouts.simulation`."""

import sys

from skyrl_train.rollouts.simulation import main

if __name__ == "__main__":
    sys.exit(main())
