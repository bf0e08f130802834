"""Programs in images that were built here (benchmarks/images.py): read-only files, the image's user, environment and command.

bubblewrap stands in for a container engine. What an engine adds beyond that (seccomp, cgroups, networks of its own) is missing.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from waiting import limit

from benchmarks.images import build_all, tag

ENTER = ["--", "sh", "-c", 'cd "$0" && exec "$@"']
"""Enters a folder as the user; bubblewrap would as somebody else."""


def require_builder() -> None:
    """Skip a test, by name, where no image can be built or started."""
    if not shutil.which("buildah"):
        pytest.skip("buildah is not installed (Debian: apt-get install buildah mmdebstrap)")
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed (Debian: apt-get install bubblewrap)")
    if os.getuid():
        pytest.skip("images are built and mounted by root")


@dataclass
class Built:
    """An image that was built here, mounted."""

    name: str
    root: Path = field(init=False)
    config: dict = field(init=False)

    def __post_init__(self) -> None:
        build_all("buildah", [self.name], "debian")  # from its layers, where nothing changed
        self.config = json.loads(_buildah("inspect", "--type", "image", tag(self.name)))["Docker"]["config"]
        self._container = _buildah("from", "--pull-never", tag(self.name)).strip()
        self.root = Path(_buildah("mount", self._container).strip())

    def close(self) -> None:
        """Unmount it. The image stays."""
        _buildah("rm", self._container)

    @property
    def user(self) -> str:
        return self.config["User"]

    def default(self) -> list[str]:
        """What a container of the image starts when nobody names a command."""
        return [*(self.config.get("Entrypoint") or []), *(self.config.get("Cmd") or [])]

    def health_check(self) -> list[str]:
        """Its command, without the word before it that says of what form it is."""
        return self.config["Healthcheck"]["Test"][1:]

    def command(self, *argv: str | Path, network: bool = True, mounts: dict[str, Path] | None = None,
                read_only: dict[str, Path] | None = None, host: str = "", alone: bool = False, user: str = "",
                **env: str) -> list[str]:  # fmt: skip
        """A command of the image as one of this machine. `mounts` may be written to, by the image's user, or another UID:GID.

        Commands with one name of a `host` see each other's processes, as with `docker exec`; and those of this machine. With
        `alone` it sees its own only.
        """
        words = ["bwrap", "--ro-bind", self.root, "/", "--proc", "/proc", "--dev", "/dev"]
        for place in ("/tmp", "/dev/shm"):
            words += ["--perms", "1777", "--tmpfs", place]
        words += ["--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf", "--unshare-ipc", "--unshare-uts"]
        words += ["--hostname", host or "container", "--die-with-parent", "--clearenv"]
        words += [] if network else ["--unshare-net"]
        words += [] if host and not alone else ["--unshare-pid"]
        for target, source in (read_only or {}).items():
            words += ["--ro-bind", source, self._mount_point(target, source)]
        uid, gid = (user or self.user).split(":")
        for target, source in (mounts or {}).items():
            if source.stat().st_uid != int(uid):  # later everything in it is the user's own, and comes and goes
                subprocess.run(["chown", "-R", f"{uid}:{gid}", source], check=True)
            words += ["--bind", source, self._mount_point(target, source)]
        given = dict(one.split("=", 1) for one in self.config["Env"]) | env
        for key, value in {"HOSTNAME": host or "container", **given}.items():
            words += ["--setenv", key, value]
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        words += ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"]
        words += ["--bounding-set=-all", "--inh-caps=-all", *ENTER]
        words += [self.config.get("WorkingDir") or "/", *argv]
        return [str(word) for word in words]

    def _mount_point(self, target: str, source: Path) -> str:
        """Made in the layer above the image, as an engine does."""
        place = self.root / target.lstrip("/")
        if source.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        return target

    def run(self, *argv: str | Path, seconds: float = 120, **how) -> "subprocess.CompletedProcess[str]":
        """Run a command of the image to its end."""
        return subprocess.run(
            self.command(*argv, **how), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=limit(seconds)
        )


def _buildah(*words: str) -> str:
    return subprocess.run(["buildah", *words], check=True, capture_output=True, text=True, timeout=limit(60)).stdout
