"""The Azure CLI, as the smoke test uses it: a program `az` that knows these commands and no others, and keeps what they create.

Commands, their options and which of them are needed are those of Azure CLI 2.91 and of its extension `ml`
(https://learn.microsoft.com/cli/azure). Of a resource it keeps name, kind and group; the deletion of a group takes all in it
along. AZ_FAILS names commands that fail, with commas between them, AZ_HANGS those that wait until they are ended.
"""

import json
import os
import stat
import sys
import time
from pathlib import Path

GLOBAL = ("--only-show-errors", "--output", "--query", "--subscription")
FLAGS = (
    "--yes",
    "--no-pretty-print",
    "--wait",
    "--permanently-delete",
    "--expose-token",
    "--upgrade",
    "--only-show-errors",
)
GROUPED = ("--name", "--resource-group")
COMMANDS = {
    "account show": ((), ()),
    "account set": ((), ()),
    "login": ((), ("--tenant", "--use-device-code")),
    "provider register": (("--namespace",), ("--wait",)),
    "keyvault key rotate": ((), ("--vault-name", "--name", "--id")),
    "postgres flexible-server update": ((), (*GROUPED, "--admin-password", "--ids")),
    "postgres flexible-server restore": (("--source-server", *GROUPED), ("--restore-time", "--zone")),
    "deployment sub what-if": (("--location", "--template-file"), ("--parameters", "--name", "--no-pretty-print")),
    "stack sub create": (
        ("--name", "--location", "--action-on-unmanage", "--deny-settings-mode"),
        ("--template-file", "--parameters", "--yes", "--tags"),
    ),
    "stack sub show": (("--name",), ()),
    "stack sub delete": (("--action-on-unmanage",), ("--name", "--yes")),
    "account get-access-token": ((), ("--resource", "--scope", "--tenant")),
    "extension add": ((), ("--name", "--upgrade", "--yes")),
    "group create": (("--location", "--name"), ("--tags",)),
    "group delete": (("--name",), ("--yes", "--no-wait")),
    "group exists": (("--name",), ()),
    "group list": ((), ("--tag",)),
    "identity create": (GROUPED, ("--location", "--tags")),
    "identity show": ((), (*GROUPED, "--ids")),
    "acr create": ((*GROUPED, "--sku"), ("--location", "--admin-enabled")),
    "acr show": (("--name",), ("--resource-group",)),
    "acr login": (("--name",), ("--expose-token", "--resource-group")),
    "storage account create": (
        GROUPED,
        (
            "--location",
            "--kind",
            "--sku",
            "--enable-hierarchical-namespace",
            "--allow-blob-public-access",
            "--min-tls-version",
            "--allow-shared-key-access",
        ),
    ),
    "storage account show": (("--name",), ("--resource-group",)),
    "storage account blob-service-properties update": (
        ("--account-name",),
        ("--resource-group", "--enable-versioning", "--enable-delete-retention", "--delete-retention-days"),
    ),
    "storage account management-policy show": (("--account-name", "--resource-group"), ()),
    "storage account management-policy create": (("--account-name", "--resource-group", "--policy"), ()),
    "storage container-rm show": (("--storage-account", "--name"), ("--resource-group",)),
    "storage container-rm create": (("--storage-account", "--name"), ("--resource-group",)),
    "storage container create": (("--name",), ("--account-name", "--auth-mode")),
    "storage blob delete-batch": (("--source",), ("--account-name", "--pattern", "--auth-mode")),
    "storage account delete": (("--name",), ("--resource-group", "--yes")),
    "acr delete": (("--name",), ("--resource-group", "--yes")),
    "identity delete": ((), (*GROUPED, "--ids")),
    "resource list": ((), ("--resource-group", "--resource-type", "--location", "--name")),
    "resource delete": ((), (*GROUPED, "--ids", "--resource-type")),
    "ml workspace show": (GROUPED, ()),
    "ml workspace create": (
        GROUPED[1:],
        (
            "--name",
            "--location",
            "--file",
            "--managed-network",
            "--public-network-access",
            "--system-datastores-auth-mode",
        ),
    ),
    "ml workspace outbound-rule set": (
        ("--resource-group", "--workspace-name", "--rule", "--type"),
        ("--service-resource-id", "--subresource-target", "--spark-enabled", "--destination"),
    ),
    "ml workspace provision-network": (GROUPED, ("--include-spark", "--no-wait")),
    "ml workspace delete": (GROUPED, ("--permanently-delete", "--yes", "--all-resources", "--no-wait")),
    "ml compute create": (
        ("--resource-group", "--workspace-name"),
        (
            "--file",
            "--name",
            "--type",
            "--size",
            "--min-instances",
            "--max-instances",
            "--idle-time-before-scale-down",
            "--identity-type",
            "--user-assigned-identities",
        ),
    ),
    "ml compute list-usage": (("--resource-group", "--workspace-name"), ("--location",)),
    "ml compute update": (
        (*GROUPED, "--workspace-name"),
        ("--min-instances", "--max-instances", "--idle-time-before-scale-down"),
    ),
    "ml compute show": ((*GROUPED, "--workspace-name"), ()),
    "role assignment create": (
        ("--role", "--scope"),
        ("--assignee-object-id", "--assignee-principal-type", "--assignee"),
    ),
    "ad signed-in-user show": ((), ()),
}
"""Needed options, then others; by the words of the command."""


class Refused(Exception):
    """What the real one ends with, and its message."""

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


def parsed(words):
    """The command and its options. Raises Refused for what the real one does not know."""
    known = [name for name in COMMANDS if words[: len(name.split())] == name.split()]
    if not known:
        raise Refused(f"'{' '.join(words[:3])}' is misspelled or not recognized by the system.", 2)
    name = max(known, key=len)
    needed, more = COMMANDS[name]
    rest, options = words[len(name.split()) :], {}
    while rest:
        option = rest.pop(0)
        if option not in (*needed, *more, *GLOBAL):
            raise Refused(f"unrecognized arguments: {option}", 2)
        options[option] = True if option in FLAGS else rest.pop(0)
        while option == "--ids" and rest and not rest[0].startswith("--"):
            options[option] += f" {rest.pop(0)}"
    if missing := [option for option in needed if option not in options]:
        raise Refused(f"the following arguments are required: {', '.join(missing)}", 2)
    return name, options


def answer(name, options, kept):
    """What a command prints, as a value; `kept` is changed. Raises Refused."""
    what = str(options.get("--name") or "")
    group = str(options.get("--resource-group") or "")
    if group and not any(one["kind"] == "group" and one["name"] == group for one in kept):
        raise Refused(f"(ResourceGroupNotFound) Resource group '{group}' could not be found.", 3)
    login = {"accessToken": os.environ.get("AZ_TOKEN"), "expires_on": 4102444800, "expiresOn": "2100-01-01 00:00:00.0"}
    fixed = {
        "account show": {"id": "s", "name": "a subscription of the tests", "tenantId": "t"},
        "account get-access-token": login,
        "acr login": {"accessToken": "of the registry", "loginServer": f"{what}.azurecr.io"},
    }
    if name in fixed:
        return fixed[name]
    if name.endswith(" create") and name != "role assignment create":
        kind = name.removesuffix(" create")
        made = {"kind": kind, "name": what, "group": group or (what if kind == "group" else "")}
        return kept.append({**made, "tags": str(options.get("--tags", ""))})
    if name in ("group exists", "group list"):
        groups = [one for one in kept if one["kind"] == "group"]
        tagged = [one for one in groups if options.get("--tag", "") in one["tags"]]
        return tagged if name == "group list" else what in [one["name"] for one in groups]
    if name in ("group delete", "ml workspace delete"):
        kind = name.removesuffix(" delete")
        gone = [one for one in kept if one["kind"] == kind and one["name"] == what]
        if not gone:
            raise Refused(f"(ResourceNotFound) The {kind} '{what}' could not be found.", 3)
        kept[:] = [one for one in kept if one not in gone and not (kind == "group" and one["group"] == what)]
    if name.endswith(" show"):
        owner = next((one["group"] for one in kept if one["name"] == what), next((one["group"] for one in kept), ""))
        return {"id": f"/{name.split()[0]}/{what}", "principalId": "principal", "resourceGroup": owner}
    return None


def queried(value, options):
    """As `--query ... --output tsv` prints a field; all that the printed script asks for is an id."""
    if options.get("--output") == "tsv":
        return value.get(options["--query"], "cluster-principal") if value else ""
    return json.dumps(value) if value is not None else ""


def main(words):
    folder = Path(os.environ["AZ_KEPT"])
    with (folder / "az.log").open("a") as log:
        log.write(json.dumps(words) + "\n")
    try:
        name, options = parsed(list(words))
        if name in os.environ.get("AZ_HANGS", "").split(","):
            time.sleep(600)
        if name in os.environ.get("AZ_FAILS", "").split(","):
            raise Refused("(QuotaExceeded) the tests let it fail")
        state = folder / "az.json"
        kept = json.loads(state.read_text()) if state.exists() else []
        value = answer(name, options, kept)
        state.write_text(json.dumps(kept))
        print(queried(value, options))
    except Refused as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.code
    return 0


def install(folder, kept):
    """Write the program `az` into a folder; returns what must be in the environment of whoever starts it."""
    folder.mkdir(parents=True, exist_ok=True)
    kept.mkdir(parents=True, exist_ok=True)
    program = folder / "az"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).resolve()} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"AZ_KEPT": str(kept), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def asked(kept):
    """Every command line so far, as lists of words."""
    log = kept / "az.log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def there(kept):
    """What was created and is not deleted."""
    state = kept / "az.json"
    return json.loads(state.read_text()) if state.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
