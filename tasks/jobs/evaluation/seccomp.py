"""The system calls that are refused to code that a model wrote, as a filter that bubblewrap loads. See seccomp(2), bpf(4).

Refused are further processes and threads, sockets of every family, memory that no limit counts (System V, memfd), new
namespaces, mounts, debugging, keys, and what would leave the group or the parent that ends it; and every call that is newer
than Linux 5.1, of which libc can do without. Refused calls fail with EPERM, the newer ones with ENOSYS.
"""

from __future__ import annotations

import errno
import platform
import struct

from tasks.common.errors import Missing

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FIRST_NEWER = 424
"""From here on the numbers are the same everywhere; those of the x32 ABI are larger still."""
REFUSED = {
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "setsid": (112, 157), "setpgid": (109, 154),
    "prctl": (157, 167), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "socket": (41, 198), "socketpair": (53, 199), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "memfd_create": (319, 279), "io_setup": (206, 0), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "personality": (135, 92), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
}  # fmt: skip
"""Numbers on x86_64 and aarch64."""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE = 0, 4
"""Offsets in struct seccomp_data."""
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def program() -> bytes:
    """The filter for this machine. Raises Missing for one whose numbers are not known here."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise Missing(
            f"no sandbox can be made here for code that a model wrote: there is no filter of system calls for {machine}",
            remedy="Evaluate on x86_64 or aarch64, or leave evaluation.code.problems empty.",
        )
    column = list(AUDIT_ARCH).index(machine)
    numbers = sorted(number for each in REFUSED.values() if (number := each[column]) is not None)
    newer, refused = ERRNO | errno.ENOSYS, ERRNO | errno.EPERM
    lines = [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, newer),
        (LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, FIRST_NEWER), (RETURN, 0, 0, newer),
    ]  # fmt: skip
    for number in numbers:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, refused)]
    return b"".join(struct.pack("=HBBI", *line) for line in (*lines, (RETURN, 0, 0, ALLOW)))
