"""An ARM template as Azure Resource Manager takes it apart: nested deployments, parameters and the functions that we use.

It stands in for the service where a test asks what a template comes to: which resources, with which ids and names, after what,
and with which outputs. A function that we do not use is refused. https://learn.microsoft.com/azure/azure-resource-manager/templates
"""

import hashlib
import re
import uuid
from dataclasses import dataclass, field

TOKEN = re.compile(r"\s*(?:'((?:[^']|'')*)'|(\d+)|([A-Za-z_]\w*)|([().,\[\]]))")
SUBSCRIPTION = "00000000-0000-0000-0000-000000000001"
TENANT = "00000000-0000-0000-0000-0000000000ff"


@dataclass
class Resource:
    id: str
    type: str
    version: str
    name: str
    body: dict
    """As it would be sent: expressions have their values."""
    after: tuple = ()
    """Ids of dependsOn."""
    reads: set = field(default_factory=set)
    """Ids that its expressions ask for the state of."""
    deployment: str = ""


class Missing(Exception):
    """A template names what is not there."""


class Scope:
    """What expressions of one deployment see."""

    def __init__(self, estate, group, parameters):
        self.estate, self.group, self.parameters = estate, group, parameters
        self.reads = set()

    def value(self, value):
        if isinstance(value, dict):
            return {self.value(key): self.value(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner) for inner in value]
        if isinstance(value, str) and value.startswith("[["):
            return value[1:]
        if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
            return self._expression(value[1:-1])
        return value

    def _expression(self, text):
        tokens, at = [], 0
        while at < len(text):
            token = TOKEN.match(text, at)
            if not token:
                raise ValueError(f"no expression of a template: {text}")
            tokens.append(token)
            at = token.end()
        tokens = [
            (t[1].replace("''", "'"), "text") if t[1] is not None else (t[2] or t[3] or t[4], "word") for t in tokens
        ]
        value, rest = self._term(tokens)
        if rest:
            raise ValueError(f"{text}: {rest[0][0]} is left over")
        return value

    def _term(self, tokens):
        (word, kind), *rest = tokens
        if kind == "text":
            value = word
        elif word.isdigit():
            value = int(word)
        else:
            value, rest = self._call(word, rest)
        while rest and rest[0] in ((".", "word"), ("[", "word")):
            if rest[0][0] == ".":
                key, rest = rest[1][0], rest[2:]
            else:
                key, rest = self._term(rest[1:])
                rest = rest[1:]
            if key not in value:
                raise Missing(f"{key} is not among {sorted(value)}")
            value = value[key]
        return value, rest

    def _call(self, word, rest):
        assert rest and rest[0][0] == "(", word
        arguments, rest = [], rest[1:]
        while rest[0][0] != ")":
            argument, rest = self._term(rest)
            arguments.append(argument)
            rest = rest[1:] if rest[0][0] == "," else rest
        return getattr(self, f"_{word}")(*arguments), rest[1:]

    def _parameters(self, name):
        if name not in self.parameters:
            raise Missing(f"the parameter {name} is not declared")
        return self.parameters[name]

    def _subscription(self):
        return {"subscriptionId": SUBSCRIPTION, "tenantId": TENANT, "id": f"/subscriptions/{SUBSCRIPTION}"}

    def _format(self, text, *words):
        return re.sub(r"\{(\d+)\}", lambda m: str(words[int(m[1])]), text)

    def _guid(self, *words):
        return str(uuid.UUID(hashlib.md5("-".join(words).encode()).hexdigest()))

    def _tenantResourceId(self, type_, *names):  # noqa: N802
        return f"/providers/{joined(type_, names)}"

    def _subscriptionResourceId(self, type_, *names):  # noqa: N802
        return f"/subscriptions/{SUBSCRIPTION}/providers/{joined(type_, names)}"

    def _resourceId(self, *words):  # noqa: N802
        group, words = (words[0], words[1:]) if "/" not in words[0] else (self.group, words)
        return f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{group}/providers/{joined(words[0], words[1:])}"

    def _reference(self, id_, version="", full=""):
        self.reads.add(id_.lower())
        return self.estate.state(id_, whole=full == "full")


def joined(type_, names):
    provider, *types = type_.split("/")
    assert len(types) == len(names), (type_, names)
    return "/".join([provider, *(f"{t}/{n}" for t, n in zip(types, names, strict=True))])


class Estate:
    """Every resource that a template of a subscription makes."""

    def __init__(self, template, parameters=None):
        self.resources, self.results = [], {}
        scope = Scope(self, "", self._given(template, parameters or {}))
        self._deploy(template, scope, "main")
        scope.reads = set()
        self.outputs = {name: scope.value(output["value"]) for name, output in template["outputs"].items()}

    def _given(self, template, given):
        declared = template.get("parameters", {})
        unknown = sorted(set(given) - set(declared))
        if unknown:
            raise Missing(f"parameters {unknown} are given and not declared")
        result = {}
        for name, parameter in declared.items():
            if name not in given and "defaultValue" not in parameter:
                raise Missing(f"the parameter {name} has no value")
            result[name] = given.get(name, parameter.get("defaultValue"))
        plain = Scope(self, "", {})
        return {name: plain.value(value) if isinstance(value, str | list) else value for name, value in result.items()}

    def _deploy(self, template, scope, name):
        for resource in template["resources"]:
            scope.reads = set()
            if resource["type"] == "Microsoft.Resources/deployments":
                self._nested(resource, scope, name)
                continue
            body = scope.value({k: v for k, v in resource.items() if k != "dependsOn"})
            made = Resource(
                id=id_of(body, scope.group),
                type=body["type"],
                version=body["apiVersion"],
                name=body["name"],
                body=body,
                after=tuple(one.lower() for one in scope.value(resource.get("dependsOn", []))),
                reads=scope.reads,
                deployment=name,
            )
            self.resources.append(made)

    def _nested(self, resource, outer, name):
        group, inner = resource["resourceGroup"], resource["properties"]["template"]
        assert resource["properties"]["expressionEvaluationOptions"] == {"scope": "inner"}
        given = {key: outer.value(value["value"]) for key, value in resource["properties"]["parameters"].items()}
        id_ = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{group}/providers/Microsoft.Resources/deployments/{resource['name']}"
        after = tuple(one.lower() for one in outer.value(resource.get("dependsOn", [])))
        body = {key: value for key, value in resource.items() if key not in ("dependsOn", "properties")}
        made = Resource(id_, resource["type"], resource["apiVersion"], resource["name"], body, after, outer.reads, name)
        self.resources.append(made)
        scope = Scope(self, group, self._given(inner, given))
        self._deploy(inner, scope, resource["name"])
        scope.reads = set()  # what outputs ask for is there when the deployment is
        outputs = {key: {"value": scope.value(output["value"])} for key, output in inner.get("outputs", {}).items()}
        self.results[id_.lower()] = {"outputs": outputs}

    def state(self, id_, whole):
        """What a resource says of itself once it is there."""
        if (output := self.results.get(id_.lower())) is not None:
            return output
        if id_.lower() not in {one.id.lower() for one in self.resources}:
            raise Missing(f"{id_} is asked for its state, and nothing makes it")
        ids = [str(uuid.uuid5(uuid.NAMESPACE_URL, f"{kind}:{id_.lower()}")) for kind in ("principal", "client")]
        state = {"principalId": ids[0], "clientId": ids[1]}
        return {"identity": state} if whole else state

    def of(self, type_):
        return [one for one in self.resources if one.type.lower() == type_.lower()]

    def before(self, resource):
        """Ids of all that is there before a resource is made: of its own deployment, and of those that it waits for."""
        by_id = {one.id.lower(): one for one in self.resources}
        members = {}
        for one in self.resources:
            members.setdefault(one.deployment, []).append(one.id.lower())
        result, queue = set(), [resource]
        while queue:
            one = queue.pop()
            holder = next(
                (r for r in self.resources if r.type.endswith("/deployments") and r.name == one.deployment), None
            )
            for id_ in {*one.after, *(holder.after if holder else ())}:
                if id_ in result or id_ not in by_id:
                    continue
                waited = by_id[id_]
                new = {id_, *(members.get(waited.name, []) if waited.type.endswith("/deployments") else ())}
                result |= new
                queue += [by_id[other] for other in new]
        return result


def id_of(body, group):
    below = joined(body["type"], body["name"].split("/"))
    base = f"/subscriptions/{SUBSCRIPTION}" + (f"/resourceGroups/{group}" if group else "")
    scope = f"/providers/{body['scope']}" if "scope" in body else ""
    return f"{base}{scope}/providers/{below}"
