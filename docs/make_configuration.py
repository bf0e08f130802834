"""Writes docs/configuration.md and configuration-SUBJECT.md out of tasks/config/flows.py,
deployments/configuration/platform.py and deployments/azure/settings.py, and the table of docs/elastic.md out of
tasks/config/backends: `python docs/make_configuration.py`.

The tables are made from what pydantic knows of each field, so they cannot disagree with the code; a test compares the files.
What surrounds the tables is the text below. Which files and options set these values: tasks/config/files.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.azure.settings import EstateConfig
from deployments.configuration.platform import PlatformConfig
from tasks.config.cluster import elasticity_table
from tasks.config.flows import AuditConfig, BackupConfig, RehearseConfig, RetrainConfig

PAGE, ELASTIC = Path(__file__).parent / "configuration.md", Path(__file__).parent / "elastic.md"
TYPES = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
NOTHING = "empty"

HEAD = """\
# Configuration

<!-- Written by `python docs/make_configuration.py` out of tasks/config/flows.py and deployments/configuration/platform.py.
     Change the help text there, and run it again. -->

One run has one configuration: a tree of settings, one section a stage. It comes from a YAML file and from `--set`.

- `headway retrain` without `-c` takes the shipped `local`; `-c tiny` takes the shipped `tiny`; `-c my.yaml` takes a file of
  yours. The shipped ones lie in [deployments/configs](../deployments/configs).
- `-c` may be repeated: `-c tiny -c slurm` trains what `tiny` says where `slurm` says. Sections are merged key by key, and
  where two files name the same key the later one wins; a list is a value. `ssh`, `slurm`, `azureml` and `ray` say only where,
  and so do `azureml-cpu`, `azureml-nc-a100`, `azureml-nd-h100` and `azureml-spot`
  ([azureml.md](azureml.md#configurations-to-start-from)).
- A file may lie on top of another one: `based_on: azureml-nd-h100`, a shipped configuration or a path. One that says only
  where may name what is trained when no file does: `trains: codeparrot`.
- A file names only what it changes. Everything else has the default of the tables below.
- `--set a.b=value` changes one setting of that run, and may be repeated. The value is read as YAML: `3e-4`, `true`,
  `[a, b]`, and nothing at all for empty.
- A misspelt key, a value of the wrong type, or one outside its limits ends the command with exit code 2. Nothing was
  started then, and the message names the key, and the closest one that there is.

```console
$ headway retrain -c tiny --dry-run --set training.learning_rate=1e-3 --set training.steps=90
$ headway retrain -c tiny --dry-run --set training.learning_rat=1e-3   # exit code 2
```

A change runs those stages again that have the setting in their key, and all that depend on what they make. Which stage has
which section in its key is in [stages.md](stages.md); `--dry-run` shows it for a change that you consider.

`headway validate`, `headway revalidate` and `headway qualify` read the same files, and take the sections that they need:
`validation`, `preprocessing` and `cluster`; these with `evaluation`, `comparison` and `revalidation`; `cluster`,
`benchmark` and `training`.
`revalidate` looks at the champion of `training.model`; the forms of its deployments call that setting `model`.

## Rules between settings

- `training.global_batch_size` is a multiple of `training.micro_batch_size` times the number of ranks
  (`cluster.nodes` x `cluster.ranks_per_node`); of an elastic job, for every number of nodes in its range; with
  `benchmark.act.min_nodes`, for every number from there to `cluster.nodes`.
- `benchmark.act.min_nodes` is at most `cluster.nodes`; a training run's `benchmark.checks` have `compute` and `collectives`.
- A backend has what it needs: `ssh` its hosts, `azureml` its workspace; `local` has one node.
- `training.warmup_steps` is smaller than `training.steps`.
- `training.network.hidden_size` is a multiple of `training.network.heads`, and `heads` of `kv_heads`.
- `validation.text_field` and `preprocessing.text_field` are the same.

## Environment

| variable | what it does |
| --- | --- |
| `HEADWAY_HOME` | Folder for all state. Without it: `.headway` in the working directory. |
| `MLFLOW_TRACKING_URI` | MLflow server or database that runs are published to. Without it: a SQLite file under the home. |
| `MLFLOW_EXPERIMENT_NAME` | MLflow experiment of the runs. Without it: the model's name, or the cluster's. |
| `HEADWAY_MLFLOW_WEIGHTS` | `copy` puts the weights of models [into MLflow](lineage.md#load-a-model). Without it: `store`. |
| `HEADWAY_PERSON`, `HEADWAY_TOKEN` | Who you are, where the [policy](access.md) asks. |
| `HEADWAY_POLICY`, `HEADWAY_TRUST`, `HEADWAY_STORES` | Other files; refused where the home has its own, or a policy. |
| `HEADWAY_STORE_SECRET` | Secret of the store that a Prefect block named to this home (platform.md). |
| `PREFECT_API_URL` | A Prefect server that is there; a policy [lists](access.md#the-file) which. Else: one under the home. |

## Settings

A name is lower case letters, digits, `.`, `_` and `-`. A share is a fraction: 0.05 is one in twenty.
"""


SUBJECTS = {
    "data": ("Settings of data", "validation preprocessing"),
    "cluster": ("Settings of machines and jobs", "cluster benchmark"),
    "training": ("Settings of training", "planning training execution"),
    "models": ("Settings of models", "evaluation comparison export approval licenses"),
    "serving": ("Settings of serving", "deployment revalidation"),
}
"""The page of each subject: its title, and the sections of a run that are on it; those of no subject are in configuration.md."""

WRITTEN = """\
<!-- Written by `python docs/make_configuration.py`. -->

Files, options and rules between settings are in [configuration.md](configuration.md).
"""

PLATFORM = """\
# Settings of the platform

`headway up --config FILE` takes a file of these settings and keeps a copy as `.headway/platform.yaml`. Every part may be left
out. [platform.md](platform.md) shows an example. A name with `[]` is a list of such sections.
"""

ESTATE = """\
# Settings of the estate

`headway estate render -c FILE` takes a file of these settings; [estate.md](estate.md) shows an example. `based_on: small`,
`production` or `isolated` takes [a preset](estate.md#presets) first. A preset gives all that must be given but
`subscription_id` and `region`; a list of the file, such as `clusters`, replaces the whole list of the preset. Without
`based_on` the file gives everything.

The folder that `render` writes has an `estate.yaml` too: every setting with the value that it was rendered from, defaults
and the preset's included. A name with `[]` is a list of such sections, and a section that is left out is not made.
"""


def main() -> None:
    for path, text in rendered().items():
        path.write_text(text, encoding="utf-8")
    rows = re.compile(r"^\| backend \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)
    ELASTIC.write_text(rows.sub(elasticity_table() + "\n", ELASTIC.read_text(encoding="utf-8")), encoding="utf-8")


def rendered() -> dict[Path, str]:
    """The text of configuration.md and of the page of each subject."""
    run, platform = RetrainConfig.model_json_schema(), PlatformConfig.model_json_schema()
    tables = {path: _section(path, found, "## The run itself") for path, found in sections(run, run, path="")}
    subject_of = {part for _, parts in SUBJECTS.values() for part in parts.split()}
    others = [text for path, text in tables.items() if re.split(r"[.\[]", path)[0] not in subject_of]
    pages = {PAGE: "\n".join([HEAD, _contents(), *others])}
    for name, (title, parts) in SUBJECTS.items():
        mine = [text for path, text in tables.items() if re.split(r"[.\[]", path)[0] in parts.split()]
        pages[_file(name)] = "\n".join([f"# {title}\n", WRITTEN, *mine])
    flows = [
        _section("", BackupConfig.model_json_schema(), "## The flow backup"),
        _section("", AuditConfig.model_json_schema(), "## The flow audit"),
        _section("", RehearseConfig.model_json_schema(), "## The flow rehearse"),
    ]
    parts = [_section(path, found, "## The platform itself") for path, found in sections(platform, platform, path="")]
    pages[_file("platform")] = "\n".join([PLATFORM, WRITTEN, *parts, *flows])
    estate = EstateConfig.model_json_schema()
    parts = [_section(path, found, "## The estate itself") for path, found in sections(estate, estate, path="")]
    pages[_file("estate")] = "\n".join([ESTATE, WRITTEN.partition("\n\n")[0] + "\n", *parts])
    return pages


def _contents() -> str:
    rows = [(name, ", ".join(f"`{part}`" for part in parts.split())) for name, (_, parts) in SUBJECTS.items()]
    rows.append(("platform", "schedules, notifications, alerts, telemetry and events; the flows `backup` and `audit`"))
    rows.append(("estate", "`headway estate render`: what is made in Azure"))
    return "\n".join(
        [
            "| page | settings |",
            "| --- | --- |",
            *(f"| [{name}]({_file(name).name}) | {words} |" for name, words in rows),
            "",
        ]
    )


def _file(subject: str) -> Path:
    return PAGE.with_name(f"configuration-{subject}.md")


def sections(schema: dict[str, Any], section: dict[str, Any], *, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every section with its path, in the order of the classes; one that lies in another comes after it.

    A class that stands in two places is told once; the second place says where.
    """
    told: dict[str, str] = {}

    def below(section: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        yield path, section
        for name, value in section["properties"].items():
            ref, many = _ref(value)
            if ref:
                place = f"{path}.{name}{many}" if path else f"{name}{many}"
                found = _placed(schema["$defs"][ref.rpartition("/")[2]], value, told.setdefault(ref, place), place)
                yield from below(found, place)

    yield from below(section, path)


def _placed(section: dict[str, Any], value: dict[str, Any], first: str, place: str) -> dict[str, Any]:
    """A section as it is told in its place: whole at its first, with the field's own help text at another one."""
    if first == place:
        return section
    words = value.get("description") or section["description"]
    return {"description": f"{words} The settings are those of `{first}`.", "properties": {}}


def _ref(value: dict[str, Any]) -> tuple[str, str]:
    """The class of a section, and `[]` when there may be many of it."""
    items = value.get("items", {})
    if "$ref" in items:
        return items["$ref"], "[]"
    kinds = [value, *value.get("anyOf", [])]  # a section that may be left out stands in `anyOf` beside null
    return next((kind["$ref"] for kind in kinds if "$ref" in kind), ""), ""


def _section(path: str, section: dict[str, Any], top: str) -> str:
    settings = {name: value for name, value in section["properties"].items() if not _ref(value)[0]}
    head = f"## `{path}`" if path else top
    table = ["| setting | type | default | limits | what it is |", "| --- | --- | --- | --- | --- |"]
    rows = [_row(f"{path}.{name}" if path else name, value) for name, value in settings.items()]
    return "\n".join([head, "", _one_line(section["description"]), "", *([*table, *rows, ""] if rows else [])])


def _row(name: str, value: dict[str, Any]) -> str:
    kinds = value.get("anyOf", [value])
    known = next(kind for kind in kinds if kind.get("type") != "null")
    cells = (f"`{name}`", _type(known, optional=len(kinds) > 1), _default(value), _limits(known), _help(value))
    return "| " + " | ".join(cells) + " |"


def _type(kind: dict[str, Any], *, optional: bool) -> str:
    if kind["type"] == "array":
        word = f"list of {TYPES[kind['items']['type']]}"
    elif kind["type"] == "object":
        values = kind.get("additionalProperties") or next(iter(kind["patternProperties"].values()))
        word = f"{TYPES[values['type']]} by name"
    else:
        word = TYPES[kind["type"]]
    return f"{word}, or {NOTHING}" if optional else word


def _default(value: dict[str, Any]) -> str:
    if "default" not in value:
        return "`{}`" if value.get("type") == "object" else "must be given"
    default = value["default"]
    return NOTHING if default in (None, "") else f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _limits(kind: dict[str, Any]) -> str:
    allowed = [kind["const"]] if "const" in kind else kind.get("enum", kind.get("items", {}).get("enum", []))
    if allowed:
        return "only " + ", ".join(f"`{one}`" for one in allowed)
    limits = [f"{sign} {_number(kind[key])}" for key, sign in LIMITS.items() if key in kind]
    return ", ".join([*limits, *([f"`{kind['pattern']}`"] if "pattern" in kind else [])])


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else str(value)


def _help(value: dict[str, Any]) -> str:
    return _one_line(value.get("description", "")).replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
