"""Files of a checkpoint encrypted to their recipients' public keys (https://age-encryption.org/v1)."""

from collections.abc import Sequence
from pathlib import Path

# pyrage is written in Rust and has no types.
# pyright: reportAttributeAccessIssue=false
import pyrage

from tx.errors import RequestError

SUFFIX = ".age"


def parse_recipients(recipients: Sequence[str]) -> list[object]:
    """Parse public keys, `age1…` or SSH's. Raises RequestError."""
    keys: list[object] = []
    for number, text in enumerate(recipients):
        kind = pyrage.x25519.Recipient if text.startswith("age1") else pyrage.ssh.Recipient
        try:
            keys.append(kind.from_str(text))
        except pyrage.RecipientError as error:
            raise RequestError(
                f"age_encryption_recipients[{number}] must be a public key, age1… or an SSH key of type ssh-ed25519 or "
                f"ssh-rsa; got {text[:40]!r} ({error})"
            ) from error
    return keys


def encrypt_folder(folder: Path, recipients: Sequence[str]) -> None:
    """Replace each file by an encrypted one, `NAME.age`."""
    keys = parse_recipients(recipients)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        pyrage.encrypt_file(str(path), f"{path}{SUFFIX}", keys)
        path.unlink()
