"""What a run stood on, for its provenance: which machine, what kind of machine, which software, and where its code lies.

Who ran it is tasks/security/audit.py, which commit tasks/orchestration/run.py. Nothing on the network is asked. See
docs/lineage.md.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

from tasks.common.redaction import redact
from tasks.config.base import digest, image_digest, told_sku


def surroundings() -> dict[str, str]:
    """Host, kind of machine and software of this process: `host`, `sku`, `environment`."""
    return {"host": socket.gethostname(), "sku": sku(), "environment": environment()}


@cache
def environment() -> str:
    """Digest of the image that this process runs in, where one was told; else of all installed distributions' `name==version`.

    Equal digests mean equal versions of everything; how something was built is told by an image's digest alone.
    """
    return image_digest() or f"packages:{digest(installed())}"


def installed() -> list[str]:
    """`name==version` of every installed distribution, sorted, each as the first folder of `sys.path` has it.

    Read from the names of the folders (NAME-VERSION.dist-info, PyPA's binary distribution format): to open hundreds of METADATA
    files, as importlib.metadata does, takes longer than a reused stage.
    """
    result: dict[str, str] = {}
    for folder in sys.path:
        for path in Path(folder or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            result.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return sorted(f"{name}=={version}" for name, version in result.items())


@cache
def sku() -> str:
    """The size of the virtual machine where somebody told it, else the processor's name and how many of it are ours."""
    return told_sku() or f"{os.cpu_count()} x {_processor()}"


@cache
def code_place() -> str:
    """Address of the repository that the code came from; where none is known, of the folder that it lies in."""
    root = Path(__file__).resolve().parents[2]
    argv = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    completed = subprocess.run(argv, capture_output=True, text=True, check=False) if (root / ".git").exists() else None
    return redact(completed.stdout.strip() if completed else "") or root.as_uri()


def _processor() -> str:
    """The name that Linux gives the first processor; elsewhere the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()
