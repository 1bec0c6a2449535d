"""CPU seconds that each kind of process of a run takes to import what it needs, here and in another checkout, in turn.

python benchmarks/process_starts.py --beside OTHER_CHECKOUT
"""

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent.parent
PACKAGES = ("skyrl-gym", "skyrl-train", "skyrl-agent", "skyrl-tx")

IMPORTS = {
    "driver": "import skyrl_train.entrypoints.main_base; from transformers import AutoTokenizer",
    "rank (FSDP2)": "import skyrl_train.workers.policy_worker, skyrl_train.training_backends.fsdp2.backend",
    "native engine": "import skyrl_train.inference_engines.native.engine",
    "Tinker server's engine": "from tx.tinker.backends.torch import sampling, training",
    "environments alone": "import skyrl_gym",
}


def cpu_seconds(code: str, checkout: Path) -> float:
    """Run `code` with the packages of a checkout in a process of its own; its processor time."""
    path = os.pathsep.join(str(checkout / package) for package in PACKAGES)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=checkout, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout of the packages")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind; the quickest counts")
    options = parser.parse_args()
    checkouts = [HERE, *([options.beside.absolute()] if options.beside else [])]
    print("| process | here | beside |\n|---|---:|---:|" if options.beside else "| process | here |\n|---|---:|")
    for name, code in IMPORTS.items():
        runs = [[cpu_seconds(code, checkout) for checkout in checkouts] for _ in range(options.repeats)]
        print(f"| {name} |", *(f"{min(each):.2f} |" for each in zip(*runs, strict=True)), flush=True)


if __name__ == "__main__":
    main()
