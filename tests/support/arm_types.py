"""Microsoft's own types of Azure's resources, as Bicep's compiler uses them: https://github.com/Azure/bicep-types-az.

They are made from the specifications of the REST APIs, one file an API version. HEADWAY_BICEP_TYPES names a clone of that
repository (bare ones will do); nothing of it is part of Headway. Beside what Bicep refuses, a value that no list names is a
problem even where the list is open.
"""

import json
import os
import re
import subprocess
from functools import cache

VARIABLE = "HEADWAY_BICEP_TYPES"
REQUIRED, READ_ONLY = 1, 2
OF_TEMPLATES = {"scope", "dependsOn", "resourceGroup", "type", "apiVersion", "name"}
"""Keys of a resource that a template has and a request has not, and those that the address holds."""


class Types:
    """The types of one clone."""

    def __init__(self, folder):
        self.git = ["git", "-C", str(folder)]
        names = subprocess.run(
            [*self.git, "ls-tree", "-r", "--name-only", "HEAD", "generated"], capture_output=True, text=True, check=True
        )
        self.files = {}
        for name in names.stdout.split():
            if part := re.fullmatch(r"generated/[^/]+/([^/]+)/([^/]+)/types\.json", name):
                self.files.setdefault((part[1], part[2]), []).append(name)
        self.commit = subprocess.run(
            [*self.git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        self.read, self.resource = cache(self._read), cache(self._resource)

    def _read(self, name):
        return json.loads(
            subprocess.run([*self.git, "cat-file", "-p", f"HEAD:{name}"], capture_output=True, check=True).stdout
        )

    def _resource(self, type_, version):
        """The file with a resource's type, and where its body stands in it; None: there is none of that version."""
        for name in self.files.get((type_.split("/")[0].lower(), version), []):
            for entry in self.read(name):
                if entry["$type"] == "ResourceType" and entry["name"].lower() == f"{type_}@{version}".lower():
                    return name, int(entry["body"]["$ref"].rpartition("/")[2])
        return None

    def problems(self, resource):
        """What is wrong with the body of a resource, one sentence each."""
        if (place := self.resource(resource["type"], resource["apiVersion"])) is None:
            return [f"{resource['type']}@{resource['apiVersion']} is no type"]
        name, index = place
        body = {key: value for key, value in resource.items() if key not in OF_TEMPLATES}
        return list(Reader(self.read(name)).look(index, body, "", top=True))


class Reader:
    """The types of one file."""

    def __init__(self, types):
        self.types = types

    def look(self, index, value, path, top=False):
        entry = self.types[index]
        yield from getattr(self, f"_{entry['$type']}")(entry, value, path, **({"top": top} if top else {}))

    def _ref(self, ref):
        return int(ref["$ref"].rpartition("/")[2])

    def _ObjectType(self, entry, value, path, top=False):  # noqa: N802
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is no object"
            return
        yield from self._members(entry.get("properties", {}), entry.get("additionalProperties"), value, path, top)

    def _members(self, known, additional, value, path, top=False):
        for name, one in known.items():
            if one["flags"] & REQUIRED and name not in value and not (top and name in OF_TEMPLATES):
                yield f"{path}.{name} is missing"
        for name, inner in value.items():
            if name in known:
                if known[name]["flags"] & READ_ONLY:
                    yield f"{path}.{name} is read-only"
                yield from self.look(self._ref(known[name]["type"]), inner, f"{path}.{name}")
            elif additional is not None:
                yield from self.look(self._ref(additional), inner, f"{path}.{name}")
            else:
                yield f"{path}.{name} is unknown"

    def _DiscriminatedObjectType(self, entry, value, path, top=False):  # noqa: N802
        key = entry["discriminator"]
        word = value.get(key) if isinstance(value, dict) else value
        if not isinstance(value, dict) or not isinstance(word, str) or word not in entry["elements"]:
            yield f"{path}.{key}: {word!r} is none of {sorted(entry['elements'])}"
            return
        chosen = self.types[self._ref(entry["elements"][value[key]])]
        known = {**entry.get("baseProperties", {}), **chosen["properties"]}
        yield from self._members(known, chosen.get("additionalProperties"), value, path, top)

    def _UnionType(self, entry, value, path):  # noqa: N802
        members = [self.types[self._ref(one)] for one in entry["elements"]]
        literals = [one["value"] for one in members if one["$type"] == "StringLiteralType"]
        if literals and value not in literals:
            yield f"{path}: {value!r} is none of {literals}"
        elif not literals and all(list(self.look(self._ref(one), value, path)) for one in entry["elements"]):
            yield f"{path}: {value!r} is none of the kinds"

    def _ArrayType(self, entry, value, path):  # noqa: N802
        if not isinstance(value, list):
            yield f"{path}: {value!r} is no list"
            return
        if not entry.get("minLength", 0) <= len(value) <= entry.get("maxLength", 10**6):
            yield f"{path}: {len(value)} entries"
        for number, inner in enumerate(value):
            yield from self.look(self._ref(entry["itemType"]), inner, f"{path}[{number}]")

    def _StringType(self, entry, value, path):  # noqa: N802
        if not isinstance(value, str):
            yield f"{path}: {value!r} is no text"
        elif not entry.get("minLength", 0) <= len(value) <= entry.get("maxLength", 10**6):
            yield f"{path}: {value!r} has {len(value)} characters"
        elif "pattern" in entry and not re.search(entry["pattern"], value):
            yield f"{path}: {value!r} is not of the form {entry['pattern']}"

    def _StringLiteralType(self, entry, value, path):  # noqa: N802
        if value != entry["value"]:
            yield f"{path}: {value!r} is not {entry['value']!r}"

    def _IntegerType(self, entry, value, path):  # noqa: N802
        if not isinstance(value, int) or isinstance(value, bool):
            yield f"{path}: {value!r} is no whole number"
        elif not entry.get("minValue", -(2**63)) <= value <= entry.get("maxValue", 2**63):
            yield f"{path}: {value!r} is out of range"

    def _BooleanType(self, entry, value, path):  # noqa: N802
        if not isinstance(value, bool):
            yield f"{path}: {value!r} is neither true nor false"

    def _AnyType(self, entry, value, path):  # noqa: N802
        yield from ()

    _NullType = _AnyType


def clone():
    """The clone that the environment names; empty: none."""
    return os.environ.get(VARIABLE, "")
