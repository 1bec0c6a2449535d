"""Container image made of this machine's own programs, for machines that cannot pull one.

    python -m skyrl_gym.sandbox.machine_image NAME [--engine podman] [--programs git make]

It holds a shell, the usual small programs, this Python with its standard library, and the shared libraries of these.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.container_engine import START_SECONDS, EngineName, find_engine, has_image, run_engine

PROGRAMS = re.findall(
    r"\S+",
    "sh bash env cat ls cp mv rm mkdir rmdir ln touch chmod stat head tail tee wc sort uniq cut tr seq date sleep"
    " true false test [ echo printf id uname yes dd df du sed grep awk find xargs tar gzip base64 mktemp mkfifo"
    " truncate basename dirname readlink realpath install timeout setsid prlimit ps kill expr diff cmp md5sum sha256sum"
    " nproc pwd which",
)
"""Programs that commands of the tools, tasks and tests use; those that this machine lacks are left out."""
LEFT_OUT = {
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "tkinter",
    "turtledemo",
    "site-packages",
    "dist-packages",
}
"""Folders of the standard library that are not copied."""
SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin"
LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")
FOLDERS = {"tmp": 0o1777, "root": 0o755, "etc": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755}
TEXTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}


def write_machine_image(
    path: Path, programs: Sequence[str] = tuple(PROGRAMS), folders: Mapping[str, Path] | None = None
) -> None:
    """Write the root file system as a tar.

    Args:
        folders: path inside -> folder of this machine that is copied.
    """
    interpreter = Path(os.path.realpath(sys.executable))
    executables = [Path(found) for name in programs if (found := shutil.which(name, path=SYSTEM_PATH))]
    python_files = list(_files(Path(sysconfig.get_paths()["stdlib"])))
    extensions = [file for file in python_files if file.suffix == ".so"]
    # Path in the image -> file here. Libraries lie where the loader looks for them, whatever that leads to here.
    content = {f"usr/bin/{file.name}": str(file) for file in executables}
    content |= {str(file)[1:]: str(file) for file in [interpreter, *python_files]}
    found = libraries([*executables, interpreter, *extensions])
    content |= {re.sub(r"^/(?=lib)", "usr/", file).lstrip("/"): file for file in found}
    with tarfile.open(path, "w") as image:
        for name, mode in FOLDERS.items():
            _add(image, name, tarfile.DIRTYPE, mode=mode)
        for name, text in TEXTS.items():
            _add(image, name, tarfile.REGTYPE, text.encode())
        for name in ("bin", "lib", "lib64", "sbin"):  # as on any present distribution
            _add(image, name, tarfile.SYMTYPE, link=f"usr/{name}")
        _add(image, "usr/bin/python3", tarfile.SYMTYPE, link=str(interpreter))
        _add(image, "usr/bin/python", tarfile.SYMTYPE, link="python3")
        for name, file in content.items():
            image.add(os.path.realpath(file), name)
        for name, folder in (folders or {}).items():
            image.add(folder, name.lstrip("/"))


def libraries(files: Sequence[Path]) -> list[str]:
    """Return the paths of the shared libraries that these files are linked with, the loader among them, and of what
    glibc loads by itself: without libgcc_s a process ends by SIGABRT where a thread exits."""
    said = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    found = set(LIBRARY.findall(said))
    beside = {os.path.join(os.path.dirname(file), "libgcc_s.so.1") for file in found if "/libc.so" in file}
    return sorted(found | set(filter(os.path.exists, beside)))


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        yield from (Path(place, name) for name in names if not name.startswith(("_tkinter", "_test")))


def _add(
    image: tarfile.TarFile, name: str, kind: bytes, data: bytes = b"", *, mode: int = 0o644, link: str = ""
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname, entry.size = kind, mode, link, len(data)
    image.addfile(entry, io.BytesIO(data))


def make_machine_image(
    engine: EngineName, name: str, programs: Sequence[str] = (), folders: Mapping[str, Path] | None = None
) -> None:
    """Make an image of this machine's programs, the usual ones and further ones. Raises InfraError."""
    with tempfile.TemporaryDirectory(prefix="skyrl-image-") as folder:
        path = Path(folder, "image.tar")
        write_machine_image(path, [*PROGRAMS, *programs], folders)
        run_engine(engine, ["import", str(path), name], timeout=START_SECONDS)


def ensure_machine_image(engine: EngineName, name: str) -> None:
    """Make an image of this machine's usual programs unless there is one of that name. Raises InfraError."""
    if not has_image(engine, name):
        make_machine_image(engine, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_gym.sandbox.machine_image",
        description="Build a container image from this machine's programs, if none can be pulled.",
    )
    parser.add_argument("name", help="name of the image, such as localhost/machine")
    parser.add_argument(
        "--engine", choices=get_args(EngineName), help="container engine (default: the first available)"
    )
    parser.add_argument("--programs", nargs="*", default=(), help="additional programs, such as git")
    arguments = parser.parse_args()
    try:
        make_machine_image(arguments.engine or find_engine(), arguments.name, arguments.programs)
    except InfraError as error:
        parser.exit(1, f"{error}\n")
    print(arguments.name)


if __name__ == "__main__":
    main()
