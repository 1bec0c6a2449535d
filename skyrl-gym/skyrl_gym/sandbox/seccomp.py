"""System calls a sandboxed command may not make, as a seccomp filter (classic BPF) that bubblewrap installs.

A second layer of isolation. Namespaces and limits contain a command only while it cannot create namespaces, access
global resources (the kernel's keyring, AF_VSOCK to the host of a virtual machine, the kernel log), or allocate memory
outside of its resident set (memfd, System V IPC). Calls that need a capability are not listed: a command has none.
"""

import errno
import platform
import socket
import struct
from functools import cache

from skyrl_gym.error import InfraError

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
ERRNO = 0x00050000

NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET."""

REFUSED = {
    # name: (errno, number on x86_64, number on aarch64)
    "unshare": (errno.EPERM, 272, 97),
    "setns": (errno.EPERM, 308, 268),
    "clone3": (errno.ENOSYS, 435, 435),  # its flags are behind a pointer; the C library falls back to clone
    "ptrace": (errno.EPERM, 101, 117),
    "process_vm_readv": (errno.EPERM, 310, 270),
    "process_vm_writev": (errno.EPERM, 311, 271),
    "add_key": (errno.EPERM, 248, 217),
    "request_key": (errno.EPERM, 249, 218),
    "keyctl": (errno.EPERM, 250, 219),
    "syslog": (errno.EPERM, 103, 116),
    "bpf": (errno.EPERM, 321, 280),
    "perf_event_open": (errno.EPERM, 298, 241),
    "userfaultfd": (errno.EPERM, 323, 282),
    "io_uring_setup": (errno.ENOSYS, 425, 425),
    "io_uring_enter": (errno.ENOSYS, 426, 426),
    "io_uring_register": (errno.ENOSYS, 427, 427),
    "fanotify_init": (errno.EPERM, 300, 262),
    "memfd_create": (errno.ENOSYS, 319, 279),
    "memfd_secret": (errno.ENOSYS, 447, 447),
    "shmget": (errno.ENOSYS, 29, 194),
    "semget": (errno.ENOSYS, 64, 190),
    "msgget": (errno.ENOSYS, 68, 186),
    "fallocate": (errno.EOPNOTSUPP, 285, 47),  # blocks that nobody wrote; the C library falls back to writing
}
SHARED, ANONYMOUS = 0x01, 0x20
"""Flags of mmap. Together they give memory that remains after all but a page of it is unmapped, and that then counts in
no resident set."""
SOCKET_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: AF_NETLINK, to list interfaces

MACHINES = {
    # machine: (audit architecture, column of REFUSED, numbers of socket, clone and mmap)
    "x86_64": (0xC000003E, 1, 41, 56, 9),
    "aarch64": (0xC00000B7, 2, 198, 220, 222),
}
X32_BIT = 0x40000000

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FIRST_ARGUMENT_OFFSET, FOURTH_ARGUMENT_OFFSET = (
    0,
    4,
    16,
    40,
)  # in struct seccomp_data, little endian


@cache
def build_seccomp_filter(machine: str = platform.machine()) -> bytes:
    """Assemble the filter for a processor architecture. Raises InfraError if its system calls are unknown here."""
    if machine not in MACHINES:
        raise InfraError(f"the sandbox supports the system calls of {', '.join(MACHINES)}, not of {machine}")
    architecture, column, socket_number, clone_number, mmap_number = MACHINES[machine]
    program = [
        _encode_instruction(LOAD, ARCHITECTURE_OFFSET),
        _encode_instruction(JUMP_EQUAL, architecture, 1, 0),
        _encode_instruction(RETURN, KILL_PROCESS),
        _encode_instruction(LOAD, NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        program += [_encode_instruction(JUMP_GREATER_EQUAL, X32_BIT, 0, 1), _encode_instruction(RETURN, KILL_PROCESS)]
    for refused in REFUSED.values():
        program += [
            _encode_instruction(JUMP_EQUAL, refused[column], 0, 1),
            _encode_instruction(RETURN, ERRNO | refused[0]),
        ]
    program += [
        _encode_instruction(JUMP_EQUAL, clone_number, 0, 4),
        _encode_instruction(LOAD, FIRST_ARGUMENT_OFFSET),
        _encode_instruction(JUMP_ANY_BIT, NAMESPACE_FLAGS, 0, 1),
        _encode_instruction(RETURN, ERRNO | errno.EPERM),
        _encode_instruction(RETURN, ALLOW),
        _encode_instruction(JUMP_EQUAL, mmap_number, 0, 5),
        _encode_instruction(LOAD, FOURTH_ARGUMENT_OFFSET),
        _encode_instruction(JUMP_ANY_BIT, SHARED, 0, 2),
        _encode_instruction(JUMP_ANY_BIT, ANONYMOUS, 0, 1),
        _encode_instruction(RETURN, ERRNO | errno.EPERM),
        _encode_instruction(RETURN, ALLOW),
        _encode_instruction(JUMP_EQUAL, socket_number, 1, 0),
        _encode_instruction(RETURN, ALLOW),
        _encode_instruction(LOAD, FIRST_ARGUMENT_OFFSET),
    ]
    for family in SOCKET_FAMILIES:
        program += [_encode_instruction(JUMP_EQUAL, family, 0, 1), _encode_instruction(RETURN, ALLOW)]
    program.append(_encode_instruction(RETURN, ERRNO | errno.EAFNOSUPPORT))
    return b"".join(program)


def _encode_instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
