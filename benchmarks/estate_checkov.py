"""Look at the rendered estates with checkov, a program in an environment of its own.

    python -m venv ../checkov && ../checkov/bin/pip install checkov
    python benchmarks/estate_checkov.py ../checkov/bin/checkov

Ends with 1 when a check fails that EXEMPT has no reason for, or when a reason stands there that nothing needs any more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from deployments.azure.render import files
from deployments.azure.settings import PRESETS, estate_of

SETTINGS = {"subscription_id": "00000000-0000-0000-0000-000000000001", "region": "westeurope"}
HOST = {"host": {"ssh_key": "ssh-ed25519 AAAA me"}}
OPTIONS: dict[str, dict[str, object]] = {
    "small": {},
    "production": {**HOST, "file_system": {"storage": "lustre-125", "tib": 16}},
    "isolated": {**HOST, "file_system": {"storage": "netapp-premium", "tib": 4}},
}
"""What each preset is looked at with, so that every module is rendered."""
PUBLIC = "the network of `small` is public, and says so: who asks shows a token of Microsoft Entra"
FIREWALL = (
    "`private` is reached from `allowed_addresses` through a firewall that denies the rest; `isolated` has it disabled"
)
ZRS = "checkov does not count three zones (ZRS) as replication; a second region is what `headway backup` is for"
EXEMPT = {
    ("small", "CKV2_AZURE_49"): PUBLIC,
    ("small", "CKV_AZURE_109"): PUBLIC,
    ("small", "CKV_AZURE_139"): PUBLIC,
    ("small", "CKV_AZURE_189"): PUBLIC,
    ("small", "CKV_AZURE_243"): PUBLIC,
    ("small", "CKV_AZURE_35"): PUBLIC,
    ("small", "CKV_AZURE_59"): PUBLIC,
    ("small", "CKV_AZURE_163"): "a registry of tier Basic; Defender is a setting, and costs by image",
    ("production", "CKV2_AZURE_49"): FIREWALL,
    ("production", "CKV_AZURE_139"): FIREWALL,
    ("production", "CKV_AZURE_189"): FIREWALL,
    ("production", "CKV_AZURE_59"): FIREWALL,
    (
        "production",
        "CKV_AZURE_40",
    ): "a key that expires stops models from being signed; rotating it is a person's decision",
    (
        "isolated",
        "CKV_AZURE_40",
    ): "a key that expires stops models from being signed; rotating it is a person's decision",
    ("production", "CKV_AZURE_50"): "patching and backup of the machine are extensions",
    ("isolated", "CKV_AZURE_50"): "patching and backup of the machine are extensions",
    **{(preset, "CKV_AZURE_206"): ZRS for preset in ("small", "production", "isolated")},
    **{
        (preset, "CKV_AZURE_166"): "in quarantine no image can be pulled until a scanner of yours releases it"
        for preset in ("small", "production", "isolated")
    },
}
"""Checks that fail, by preset, and why they may."""


def failed(checkov: str, preset: str) -> set[str]:
    """Checks that fail in a preset."""
    texts = files(estate_of({"based_on": preset, **SETTINGS, **OPTIONS[preset]}, preset))
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            if name.startswith("modules/"):
                (Path(folder) / Path(name).name).write_text(text)
        command = [checkov, "-d", folder, "--framework", "arm", "--skip-download", "--compact", "--quiet", "-o", "json"]
        output = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    print(preset, json.dumps(output["summary"]))
    assert not output["summary"]["parsing_errors"] and output["summary"]["resource_count"] > 50
    return {one["check_id"] for one in output["results"]["failed_checks"]}


def main() -> None:
    wrong = 0
    for preset in sorted(path.stem for path in PRESETS.glob("*.yaml")):
        found, known = failed(sys.argv[1], preset), {check for name, check in EXEMPT if name == preset}
        for check in sorted(found ^ known):
            print(
                f"  {preset} {check}: {'fails without a reason' if check in found else 'has a reason, and does not fail'}"
            )
            wrong += 1
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
