"""Builds the images of docker/ with buildah or docker, whichever is installed: `python -m benchmarks.images`, or `make images`.

    python -m benchmarks.images [--base debian] [NAME ...]
    python -m benchmarks.images --sizes
    python -m benchmarks.images --refresh

`--base debian` builds on a small base made of Debian's packages (mmdebstrap) instead of the bases that the Dockerfiles name: for
machines that reach no registry of images. The CUDA variant of the cluster's image has no such base and is left out.

pip in a build uses the index, the certificates and the folders of wheels of this machine's pip: the settings are a secret of the
build, and folders that they name are mounted. Only empty folders, where they were mounted, stay in an image.

`--refresh` (`make images-refresh`) asks the registries, by skopeo, for the digest that each tag has today, and writes it behind
the tag.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
DEBIAN = "bookworm"
BASE = f"localhost/headway/base:{DEBIAN}-slim"
PACKAGES = ("ca-certificates", "python3", "python3-venv", "python-is-python3", "usr-is-merged")
# As in the slim images of Debian and Docker: no manuals, no translations, and no copies of packages after apt installed them.
NO_CACHES = 'APT::Keep-Downloaded-Packages "false"; Dir::Cache { pkgcache ""; srcpkgcache ""; };'
SLIM = (
    "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man")),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    f'--customize-hook=rm -f "$1"/var/cache/apt/*.bin && echo \'{NO_CACHES}\' > "$1/etc/apt/apt.conf.d/docker-clean"',
)


@dataclass(frozen=True)
class Image:
    """One image, and how it is built."""

    dockerfile: str
    target: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    base_of: str = ""
    """The Dockerfile whose base this image has, where it is not its own's."""
    on_debian: bool = True
    """Whether the base made here can be its base."""
    cpu_torch: bool = False
    """Whether torch comes from PyTorch's index of CPU builds: the others bring gigabytes of CUDA."""


IMAGES = {
    "orchestrator": Image("docker/orchestrator.Dockerfile"),
    "platform": Image("docker/orchestrator.Dockerfile", arguments={"EXTRAS": "local"}, cpu_torch=True),
    "endpoint": Image("docker/endpoint.Dockerfile"),
    "cluster-cpu": Image(
        "docker/cluster.Dockerfile",
        target="cpu",
        arguments={"PYTHON": "python3"},
        base_of="docker/endpoint.Dockerfile",
        cpu_torch=True,
    ),
    "cluster": Image("docker/cluster.Dockerfile", on_debian=False),
    "development": Image(".devcontainer/Dockerfile"),
}
TORCH_CPU = "https://download.pytorch.org/whl/cpu"


def tag(name: str) -> str:
    """What an image is called here."""
    return f"localhost/headway/{name}:{VERSION}"


class BuildError(Exception):
    """An image was not built; the message says why and what helps."""


def engine() -> str:
    """buildah or docker."""
    failed = []
    for program in ("buildah", "docker"):
        if not shutil.which(program):
            failed.append(f"{program} is not installed")
            continue
        ran = subprocess.run([program, "info"], capture_output=True, text=True)
        if ran.returncode == 0:
            return program
        failed.append(f"`{program} info` fails: {(ran.stderr.splitlines() or ['it printed no reason'])[-1]}")
    raise BuildError(
        f"no program here builds images. {'; '.join(failed)}. "
        "Install buildah as root (Debian: apt-get install buildah mmdebstrap), or start Docker"
    )


def run(*words: str | Path) -> str:
    """The output of a command; its errors go to the terminal."""
    ran = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise BuildError(f"{words[0]} {words[1]} ended with {ran.returncode}")
    return ran.stdout


# --- pip's settings


def pip_settings() -> dict[str, str]:
    """What the pip of this machine is told by its files and by the environment."""
    lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    values = (line.split("=", 1) for line in lines)
    # The environment comes first in the list, and counts more than files do.
    return {name.rpartition(".")[2]: value.strip("'\"") for name, value in reversed([*values])}


def named_paths(settings: dict[str, str]) -> list[str]:
    """Files and folders of this machine that pip's settings name."""
    words = [word for value in settings.values() for word in value.replace("\\n", " ").split()]
    paths = [urlsplit(word).path if word.startswith("file:") else word for word in words]
    # An index of files has its links beside it, not in it.
    paths = [path.removesuffix("/").removesuffix("/simple") for path in paths]
    return sorted({path for path in paths if path.startswith("/") and Path(path).exists()})


def settings_for(image: Image, settings: dict[str, str]) -> dict[str, str]:
    """The same with the index of torch's CPU builds, where the image is to have them and no folder of wheels is named."""
    if not image.cpu_torch or "find-links" in settings:
        return settings
    return settings | {"extra-index-url": f"{settings.get('extra-index-url', '')} {TORCH_CPU}".strip()}


@contextmanager
def pip_options(program: str, image: Image) -> Iterator[list[str]]:
    """Options of a build that give its pip the settings of this machine's, for the time of the build alone."""
    settings = settings_for(image, pip_settings())
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("[global]\n")
        file.writelines(f"{name} = {value.replace(chr(92) + 'n', ' ')}\n" for name, value in sorted(settings.items()))
        file.flush()
        options = ["--secret", f"id=pip,src={file.name}"]
        if program == "buildah":
            for path in named_paths(settings):
                options += ["--volume", f"{path}:{path}:ro"]
        yield options


# --- building


def make_base() -> None:
    """An image of Debian's packages, under the name `BASE`."""
    if not shutil.which("mmdebstrap"):
        raise BuildError("the base is made by mmdebstrap, which is not installed (Debian: apt-get install mmdebstrap)")
    with tempfile.TemporaryDirectory() as folder:
        rootfs = Path(folder) / "rootfs.tar"
        run("mmdebstrap", "--variant=minbase", *SLIM, f"--include={','.join(PACKAGES)}", DEBIAN, rootfs)
        import_base(engine(), rootfs)


def import_base(program: str, rootfs: Path) -> None:
    """An image of one layer, which is this archive."""
    if program == "docker":
        run("docker", "import", rootfs, BASE)
        return
    container = run("buildah", "from", "scratch").strip()
    run("buildah", "add", "--quiet", container, rootfs, "/")
    run("buildah", "config", "--env", "PATH=/usr/local/bin:/usr/bin:/usr/local/sbin:/usr/sbin", container)
    run("buildah", "commit", "--quiet", "--rm", container, BASE)


def exists(program: str, image: str) -> bool:
    """Whether an image is in the storage of this machine."""
    return subprocess.run([program, "inspect", "--type", "image", image], capture_output=True).returncode == 0


def arguments_of(image: Image, base: str) -> dict[str, str]:
    """The build's arguments; `base` is in the place of the base that a Dockerfile names."""
    if not base and image.base_of:
        base = re.findall(r"^ARG BASE=(\S+)", (ROOT / image.base_of).read_text(encoding="utf-8"), re.MULTILINE)[0]
    return image.arguments | ({"BASE": base} if base else {})


def build(program: str, name: str, base: str) -> None:
    """Build one image; `base` is in the place of the base that its Dockerfile names."""
    image = IMAGES[name]
    arguments = arguments_of(image, base)
    words = [program, "build", "--file", image.dockerfile, "--tag", tag(name)]
    words += ["--target", image.target] if image.target else []
    words += [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    # Docker keeps layers by itself. Its format has the health check, which OCI's lacks.
    words += ["--layers", "--format", "docker", "--isolation", "chroot"] if program == "buildah" else []
    with pip_options(program, image) as options:
        ran = subprocess.run([*words, *options, "."], cwd=ROOT, stdin=subprocess.DEVNULL)
    if ran.returncode:
        raise BuildError(
            f"{tag(name)} was not built: the output above says why. Where no registry of images can be reached, "
            "give --base debian (make images BASE=debian)"
        )


def sizes(program: str) -> str:
    """A line for each image that is here, and one for each of its layers."""
    lines = []
    for name in IMAGES:
        if exists(program, tag(name)):
            layers = layers_of(program, tag(name))
            lines.append(f"{name}: {sum(size for size, _ in layers) / 1e6:,.0f} MB")
            lines += [f"  {size / 1e6:>8,.1f} MB  {words}" for size, words in layers]
    return "\n".join(lines)


def layers_of(program: str, image: str) -> list[tuple[int, str]]:
    """Bytes of each layer, and the instruction that made it."""
    if program == "docker":
        history = run("docker", "history", "--no-trunc", "--human=false", "--format", "{{json .}}", image)
        rows = [json.loads(line) for line in reversed(history.splitlines())]
        return [(int(row["Size"]), row["CreatedBy"]) for row in rows if int(row["Size"])]
    described = json.loads(run("buildah", "inspect", "--type", "image", image))
    blobs = iter(json.loads(described["Manifest"])["layers"])
    history = [one for one in described["Docker"]["history"] if not one.get("empty_layer")]
    return [(blob["size"], one.get("created_by", "")) for blob, one in zip(blobs, history, strict=True)]


# --- the digests behind the tags

PIN = re.compile(r"(?P<image>[\w./-]+:[\w.-]+)@(?P<digest>sha256:[0-9a-f]{64})")
SOURCE = re.compile(r"(?P<address>https://\S+\.git)#(?P<commit>[0-9a-f]{40})")


def refresh(root: Path = ROOT) -> str:
    """Write the digest that each image's tag has today into the files that name it; a line for each image and source.

    Sources are listed only: our code is written for their commits.
    """
    files = [*root.glob("docker/*.Dockerfile"), root / "docker/compose.yaml", root / ".devcontainer/Dockerfile"]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    pinned = dict(sorted(match.groups() for text in texts.values() for match in PIN.finditer(text)))
    current = {image: current_digest(image) for image in pinned}  # all of them, before a file is written
    lines = [
        f"{image}: {'unchanged' if current[image] == old else f'{old} is now {current[image]}'}"
        for image, old in pinned.items()
    ]
    sources = sorted({match.groups() for text in texts.values() for match in SOURCE.finditer(text)})
    lines += [f"{address}: {commit} stays; {newest_tag(address)}" for address, commit in sources]
    for path, text in texts.items():
        path.write_text(PIN.sub(lambda match: f"{match['image']}@{current[match['image']]}", text), encoding="utf-8")
    return "\n".join(lines)


def current_digest(image: str) -> str:
    """The digest of what a tag names in its registry: of the index, where the image is for several platforms."""
    if not shutil.which("skopeo"):
        raise BuildError("digests are looked up by skopeo, which is not installed (Debian: apt-get install skopeo)")
    words = ["skopeo", "--command-timeout", "60s", "inspect", "--raw", f"docker://{image}"]
    ran = subprocess.run(words, capture_output=True)
    if ran.returncode:
        raise BuildError(
            f"{image}: its registry gave no manifest, and no file was changed. Does the tag still exist, and is the registry "
            f"reached from here? skopeo says: {ran.stderr.decode(errors='replace').strip()}"
        )
    if b"schemaVersion" not in ran.stdout:
        raise BuildError(
            f"{image}: what its registry sent is no manifest, and no file was changed: {ran.stdout[:80]!r}"
        )
    return f"sha256:{hashlib.sha256(ran.stdout).hexdigest()}"


def newest_tag(address: str) -> str:
    """The newest tag of a repository, as words."""
    tags = [
        line.split() for line in run("git", "ls-remote", "--tags", "--refs", "--sort=-v:refname", address).splitlines()
    ]
    return f"its newest tag is {tags[0][1].removeprefix('refs/tags/')} ({tags[0][0]})" if tags else "it has no tag"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(IMAGES)}; all without one")
    parser.add_argument("--base", default="", help="debian, or the name of an image; else what each Dockerfile names")
    parser.add_argument("--sizes", action="store_true", help="print the sizes of images and layers, and build nothing")
    parser.add_argument(
        "--refresh", action="store_true", help="bring the digests of the bases up to date, and build nothing"
    )
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in IMAGES]:
        parser.error(f"no image is called {', '.join(unknown)}; there are {', '.join(IMAGES)}")
    try:
        if given.refresh:
            print(refresh())
            return 0
        program = engine()
        if not given.sizes:
            build_all(program, given.names or [*IMAGES], given.base)
        print(sizes(program))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def build_all(program: str, names: list[str], base: str) -> None:
    """Build images, and the base where it is to be Debian's."""
    if base == "debian":
        if not exists(program, BASE):
            make_base()
        base = BASE
    for name in names:
        if base and not IMAGES[name].on_debian:
            print(f"{name}: left out, as nothing stands in for its base")
            continue
        started = time.monotonic()
        build(program, name, base)
        print(f"{name}: built in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
