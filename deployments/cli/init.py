"""`headway init`: a configuration file of the user's own, made of the shipped ones and of three answers.

The file is a shipped configuration with its comments, under other names, and with the section `cluster` of where jobs run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path
from typing import Annotated

import typer
import yaml

from deployments.cli.options import Json
from deployments.cli.output import say
from deployments.cli.overview import CONFIGURATION, STDLIB, publishing
from tasks.artifacts import parse_ref
from tasks.common.home import home
from tasks.common.redaction import redact
from tasks.config.files import BASED_ON, SHIPPED, TRAINS, Loader, load_cluster, on_its_base, places, validated
from tasks.config.flows import RetrainConfig
from tasks.data.corpus.openings import openings_of

SIZES = {"tiny": "tiny", "small": "local", "medium": "codeparrot"}
"""The shipped configuration that a size stands for."""
COSTS = {
    "tiny": "110 thousand parameters, a minute on a laptop: to see all of it once",
    "small": "0.9 million parameters, five minutes on a laptop",
    "medium": "110 million parameters, half a day on eight GPUs",
}
PROMPTS = 5
NEUTRAL = ("The ", "In ", "It is ", "A ", "1. ")
"""Beginnings of text of any kind, where the data is not at hand."""
GOLDEN = "# beginnings that a new endpoint must complete as the model did in training"
LOCAL = "local"
"""Jobs run on this machine: the configuration's default, without a section of its own."""


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path(CONFIGURATION),
    data: Annotated[
        str, typer.Option(help="The name of a dataset; or a file or folder, which becomes a dataset of that name.")
    ] = "",
    where: Annotated[
        str, typer.Option(help="Where jobs run: local, or a shipped configuration, as azureml or slurm.")
    ] = "",
    size: Annotated[str, typer.Option(help="The size of the model: tiny, small or medium.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; use the defaults.")] = False,
    as_json: Json = False,
) -> None:
    """Write a configuration file, after three questions: `headway retrain -c FILE` takes it.

    A question that an option answers is not asked. With --yes, --json or without a terminal, none is. No file is overwritten.
    """
    if file.exists():
        raise ValueError(
            f"{file} exists, and is not overwritten: move it away, or name another: headway init OTHER.yaml"
        )
    ask = not yes and not as_json and sys.stdin.isatty() and sys.stderr.isatty()
    known = sorted(path.name for path in home().glob("store/artifacts/dataset/*"))
    published = f" Published: {', '.join(known)}." if known else ""
    question = f"Data: the name of a dataset, or a file or folder that becomes one.{published}"
    data = answer(question, data, known[0] if known else STDLIB, dataset_of, ask=ask)
    dataset = dataset_of(data)
    where = answer(f"Where jobs run: {', '.join([LOCAL, *places()])}.", where, LOCAL, place_of, ask=ask)
    sizes = "\n".join(f"  {name:<8}{text}" for name, text in COSTS.items())
    size = answer(f"Size:\n{sizes}\n", size, "small", size_of, ask=ask)
    text = configuration(dataset, where, size, file, prompts_of(data, dataset))
    value = on_its_base(yaml.load(text, Loader), file)
    value.pop(TRAINS, None)  # what is trained stands in the file itself
    validated(RetrainConfig, value, str(file))
    with file.open("x", encoding="utf-8") as output:
        output.write(text)

    steps = [] if dataset in known else [publishing(dataset, data if Path(data).exists() else "")]
    steps += [f"headway retrain -c {file} --dry-run", f"headway retrain -c {file}"]
    edits = [f"  line {n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if "# change" in line]
    words = [f"Wrote {file}: {dataset}, {size}, on {where}."]
    words += ["", "Change these before you train:", *edits] if edits else []
    words += ["", "Next:", *(f"  {step}" for step in steps)]
    say({"file": str(file), "dataset": dataset, "where": where, "size": size, "next": steps}, words, as_json=as_json)


def answer(question: str, given: str, default: str, check: Callable[[str], str], *, ask: bool) -> str:
    """What an option gives, or the user answers, or the default. A wrong option raises ValueError; a user is asked again."""
    if given or not ask:
        check(given or default)
        return given or default
    while True:
        result: str = typer.prompt(question, default=default, err=True).strip()
        try:
            check(result)
        except ValueError as error:
            typer.echo(f"  {error}", err=True)
        else:
            return result


def dataset_of(data: str) -> str:
    """The name of a dataset by an answer: a name, or the path of what becomes one. Raises ValueError."""
    path = Path(data)
    if "/" not in data and not path.exists():
        return parse_ref(data, kind="dataset")[1]
    if not path.exists():
        raise ValueError(f"there is no file or folder {data}: give the path of one, or the name of a dataset")
    name = re.sub(r"[^a-z0-9._-]+", "-", path.resolve().name.split(".")[0].lower()).strip("-._")[:63]
    return name or "data"


def place_of(where: str) -> str:
    """The same word, if it says where jobs can run. Raises ValueError."""
    if where not in (LOCAL, *places()):
        raise ValueError(f"{where!r} is not a place where jobs run: give one of {', '.join([LOCAL, *places()])}")
    return where


def size_of(size: str) -> str:
    """The same word, if it is a size. Raises ValueError."""
    if size not in SIZES:
        raise ValueError(f"{size!r} is not a size: give one of {', '.join(SIZES)}")
    return size


def prompts_of(data: str, dataset: str) -> list[str]:
    """How documents of the data begin, where it lies on this machine, else the beginnings of many a text; none for code."""
    versions = sorted(home().glob(f"store/artifacts/dataset/{dataset}/*/files"), key=lambda path: path.stat().st_mtime)
    source = Path(data) if Path(data).exists() else versions[-1] if versions else None
    prompts = openings_of(source, "text", PROMPTS) if source else []
    prompts = [prompt for prompt in prompts if redact(prompt) == prompt]
    return prompts or ([] if dataset == STDLIB else list(NEUTRAL))


def configuration(dataset: str, where: str, size: str, file: Path, prompts: list[str]) -> str:
    """The text of the file; without prompts those of the shipped configuration stay."""
    shipped = (SHIPPED / f"{SIZES[size]}.yaml").read_text(encoding="utf-8")
    shipped = shipped[shipped.index("dataset:") :]
    shipped = re.sub(r"^(dataset|  model|  endpoint): .*", rf"\1: {dataset}", shipped, flags=re.MULTILINE)
    if "\n  endpoint: " not in shipped:  # else it would take the place of what `local` serves
        shipped = shipped.replace("\ndeployment:\n", f"\ndeployment:\n  endpoint: {dataset}\n")
    # The field of the text and the cluster are the shipped corpus's own, and no part of the shape of what is trained.
    foreign = r"^(cluster:\n(  .*\n)+|validation:\n  text_field: .*\n)\n"
    shipped = re.sub(foreign, "", shipped, flags=re.MULTILINE)
    shipped = re.sub(r"^  text_field: .*\n", "", shipped, flags=re.MULTILINE)
    if prompts:
        shipped = re.sub(r"^  golden_prompts: .*\n", "", shipped, flags=re.MULTILINE)
        if "\nexport:\n" not in shipped:
            shipped = shipped.replace("\ndeployment:\n", "\nexport:\n\ndeployment:\n")
        listed = "".join(f"    - {json.dumps(prompt, ensure_ascii=False)}\n" for prompt in prompts)
        shipped = shipped.replace("\nexport:\n", f"\nexport:\n  golden_prompts: {GOLDEN}\n{listed}")
    lines = [
        f"# Written by `headway init`: {COSTS[size]}.",
        f"#   headway retrain -c {file}",
        "# Every setting, its default and its unit: docs/configuration.md. `--set A.B=VALUE` changes one for a single run.",
        "",
        *shipped.rstrip().splitlines(),
    ]
    if where != LOCAL:
        lines += ["", *_place(where)]
    return "\n".join(lines) + "\n"


def _place(where: str) -> list[str]:
    """Where jobs run, as lines; of a place that is based on another, its name and what people must change."""
    base, lines = where, _lines(where)
    while named := next((line.split()[1] for line in lines if line.startswith(f"{BASED_ON}:")), ""):
        base, lines = named, _lines(named)
    if base == where:
        return lines
    cluster = load_cluster(where, [])
    own = ("cluster:", f"  {cluster.backend}:")
    changed = [
        line
        for line in lines
        if line in own or any(value in line for value in cluster.capabilities.placeholders.values())
    ]
    return [f"{BASED_ON}: {where}", *changed]


def _lines(name: str) -> list[str]:
    """Those of a shipped configuration, without the comment that it begins with."""
    lines = (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8").rstrip().splitlines()
    return list(dropwhile(lambda line: line.startswith("#"), lines))
