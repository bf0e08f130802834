"""What Headway is made of: newer versions for constraints.txt, an SBOM of each extra, known vulnerabilities.

    python -m benchmarks.supply constraints
    python -m benchmarks.supply audit [--sbom FOLDER]

`constraints` writes the newest set of versions that all extras allow together; `make constraints` installs it and runs the smoke
tests. `audit` writes EXTRA.cdx.json, a CycloneDX SBOM of what constraints.txt makes of an extra, for each, and has pip-audit look
the versions up. Exit codes of it: 0 nothing is known against them, 1 something is, 3 not all judged,
as the database did not answer or does not know a version.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
JUDGED, VULNERABLE, NOT_JUDGED = 0, 1, 3


def write_constraints() -> int:
    """Resolve the extra `dev`, which has all others in it, without today's constraints; nothing is installed."""
    if shutil.which("uv"):
        words = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--extra", "dev", "pyproject.toml"]
        run = subprocess.run(
            [*words, "--python", sys.executable], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        )
        resolved = dict(line.split("==") for line in run.stdout.split() if "==" in line)
    else:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            words = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
            subprocess.run([*words, "--report", file.name, "-e", ".[dev]"], cwd=ROOT, check=True)
            report = json.loads(Path(file.name).read_text(encoding="utf-8"))["install"]
        resolved = {one["metadata"]["name"]: one["metadata"]["version"] for one in report}
    old = dict(line.split("==") for line in CONSTRAINTS.read_text(encoding="utf-8").split())
    # A build of torch for one kind of machine (+cpu, +cu130) is not what others are held to.
    new = {canonicalize_name(name): version.partition("+")[0] for name, version in resolved.items()}
    new = {name: version for name, version in new.items() if name not in ("headway", "pip")}
    CONSTRAINTS.write_text("".join(f"{name}=={new[name]}\n" for name in sorted(new)), encoding="utf-8")
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            print(f"{name}: {old.get(name, 'new')} -> {new.get(name, 'gone')}")
    return 0


def distributions(*chosen: str) -> set[str]:
    """What these extras install, by the requirements of what is installed here; without what is for other machines."""
    ours = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    waiting = [Requirement(line) for extra in ("", *chosen) for line in ours[extra]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        one = waiting.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if (name, extras) not in seen:
            seen.add((name, extras))
            waiting += _below(name, extras) if name != "headway" else [Requirement(x) for e in extras for x in ours[e]]
    return {name for name, _ in seen} - {"headway"}


def _below(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, metadata.distribution(name).requires or []):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in ("", *extras)):
            yield requirement


def bill(extra: str, versions: dict[str, str]) -> dict[str, object]:
    """A CycloneDX 1.6 SBOM, without times and serial numbers: the same versions make the same file."""
    root = {"type": "application", "bom-ref": "headway", "name": f"headway[{extra}]", "version": PROJECT["version"]}
    components = []
    for name in sorted(distributions(extra)):
        version = versions.get(name) or metadata.version(name)  # pip is in no constraints
        purl = f"pkg:pypi/{name}@{version}"
        components.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": root}}
    return {**head, "components": components}


def audit(folder: Path) -> int:
    """Write the SBOMs, then have pip-audit judge constraints.txt."""
    versions = dict(line.split("==") for line in CONSTRAINTS.read_text(encoding="utf-8").split())
    folder.mkdir(parents=True, exist_ok=True)
    for extra in PROJECT["optional-dependencies"]:
        text = json.dumps(bill(extra, versions), indent=1)
        (folder / f"{extra}.cdx.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(PROJECT['optional-dependencies'])} SBOMs are in {folder}.")
    words = [
        "--requirement",
        str(CONSTRAINTS),
        "--no-deps",
        "--disable-pip",
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    run = subprocess.run([sys.executable, "-m", "pip_audit", *words], capture_output=True, text=True)
    try:
        looked_up = json.loads(run.stdout)["dependencies"]
    except ValueError:
        print(run.stderr.strip()[-1000:], file=sys.stderr)
        print(
            "NOT JUDGED: pip-audit is not installed, or its database of advisories could not be had.", file=sys.stderr
        )
        return NOT_JUDGED
    unknown = [one["name"] for one in looked_up if "skip_reason" in one]  # a mirror may not have the advisories
    known = [(one, advisory) for one in looked_up for advisory in one.get("vulns", [])]
    for one, advisory in known:
        mended = ", ".join(advisory["fix_versions"]) or "no release"
        print(f"{one['name']} {one['version']}: {advisory['id']}, mended in {mended}")
    print(f"{len(looked_up) - len(unknown)} versions judged, {len(known)} advisories.")
    if unknown:
        print(f"NOT JUDGED: {len(unknown)} that the database does not know: {', '.join(unknown)}", file=sys.stderr)
    return VULNERABLE if known else NOT_JUDGED if unknown else JUDGED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("constraints", "audit"))
    parser.add_argument("--sbom", type=Path, default=ROOT / "build" / "sbom", metavar="FOLDER")
    given = parser.parse_args()
    return write_constraints() if given.what == "constraints" else audit(given.sbom)


if __name__ == "__main__":
    sys.exit(main())
