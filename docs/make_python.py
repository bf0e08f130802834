"""Writes the pages of docs/python out of the docstrings and signatures of the code: `python docs/make_python.py`.

They list what somebody imports who writes a stage, a backend, an engine or a check of machines (CONTRIBUTING.md), or who calls
Headway from Python, and not every module. Nothing is imported: the source is read. A test compares the pages, and asks that
they have whatever the shipped stages, backends, engines and checks import of these modules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).parent / "python"
WIDTH = 110
"""Most columns of a signature on one line."""
HEAD = (
    "<!-- Written by `python docs/make_python.py` out of the docstrings. Change them in the code, and run it again. -->"
)


@dataclass(frozen=True)
class Page:
    """One page: what surrounds the list, the names of each module, and the shipped files whose imports it must cover."""

    title: str
    text: str
    modules: dict[str, str]
    """Names by module, in the order of the page."""
    users: tuple[str, ...] = ()
    """Globs of the shipped code that does what the page's reader wants to do."""


PAGES = {
    "index.md": Page(
        "Python",
        """\
What Python code may import from Headway, generated from its docstrings. What is not on these pages is internal, and changes
without notice.

| you write | page |
| --- | --- |
| a stage of the lifecycle, or its program | [stages](stages.md), [artifacts and gates](artifacts.md), [errors](errors.md) |
| a backend: another place where jobs run | [backends](backends.md), [their machines](machines.md) |
| an engine: another way to train | [engines](engines.md) |
| a check of machines | [checks](checks.md), [measurements](measurements.md) |
| a client of a served model | [the API of the endpoint](../api.md), which is HTTP: OpenAI's Python client works against it |
| a script that starts flows | below, and [errors](errors.md); an example is in [commands](../commands.md#from-python) |

A signature is shown as it is in the code; `self` is left out. What begins with an underscore is not shown.""",
        {
            "flows.retrain": "retrain",
            "flows.validate": "validate",
            "flows.qualify": "qualify",
            "flows.revalidate": "revalidate",
            "tasks.config.files": "load",
            "tasks.storage": "open_store open_named",
            "tasks.storage.store": "Store",
        },
    ),
    "errors.md": Page(
        "Python: errors",
        "What a caller may decide on. A user's mistake is a plain `ValueError`. Exit codes: [JSON output](../json.md).",
        {
            "tasks.common.errors": "HeadwayError GateFailed JobFailed IntegrityError Unknown Refused Conflict Missing Superseded "
            "Cancelled Suspended",
        },
    ),
    "stages.md": Page(
        "Python: stages",
        "What a [stage](../stages.md) and the program of its job import. The steps, with the files to change, are in "
        "[Add a stage](../../CONTRIBUTING.md#add-a-stage).",
        {
            "tasks.orchestration.stage": "stage",
            "tasks.orchestration.observers": "Shown",
            "tasks.orchestration.stage_context": "fetch files_of scratch publish attach attachment manifest_of note noted "
            "run_job run_again intended_nodes at_work home_folder free_disk_bytes",
            "tasks.orchestration.job_spec": "Program",
            "tasks.jobs.node.runtime": "Rank main",
        },
        ("tasks/*.py",),
    ),
    "artifacts.md": Page(
        "Python: artifacts and gates",
        "What stages hand to each other. Each kind of artifact is a class of its own in the same file; these are their bases.",
        {"tasks.artifacts": "Value Artifact Gate Check require_checks Cluster Pending parse_ref plain"},
    ),
    "backends.md": Page(
        "Python: backends",
        "What a [backend](../compute.md) imports and implements. The steps are in "
        "[Add a backend](../../CONTRIBUTING.md#add-a-backend).",
        {
            "tasks.config.backends": "BackendSettings Capabilities Elasticity",
            "tasks.compute.job": "Backend Job Failure Rendered JobState NotAccepted before_submission write_folder",
        },
        ("tasks/compute/*/backend.py", "tasks/compute/local.py", "tasks/config/backends/*.py"),
    ),
    "machines.md": Page(
        "Python: a backend's machines",
        "What a [backend](backends.md) starts on each machine, and the class that answers for its machines.",
        {
            "tasks.compute.nodes": "Machines Drained Finding read_mark node_environment node_command write_nodes ended_state "
            "clean_up execute_on_this_machine network_finding python",
        },
        ("tasks/compute/*/backend.py", "tasks/compute/local.py", "tasks/config/backends/*.py"),
    ),
    "engines.md": Page(
        "Python: engines",
        "What an [engine](../training.md) declares, and what its class in the loop does. The steps are in "
        "[Add an engine](../../CONTRIBUTING.md#add-an-engine).",
        {
            "tasks.config.engines": "Engine Planned require_no_megatron require_whole_replicas require_no_offload",
            "tasks.jobs.training.engine": "Engine Setting Saving open_engine",
        },
        ("tasks/config/engines/*.py", "tasks/jobs/training/*_engine.py"),
    ),
    "checks.md": Page(
        "Python: checks of machines",
        "What a check of the [qualification](../qualification.md) imports. The steps are in "
        "[Add a check](../../CONTRIBUTING.md#add-hardware-or-a-check-of-machines).",
        {
            "tasks.jobs.qualify.bench": "Bench Rate Outcome Together tried steady measure_windows vocabulary parameters "
            "flops_per_token",
            "tasks.jobs.qualify.machine": "Machine Missing of_kernel of_file ask_gpus ask_rows failure",
            "tasks.jobs.qualify.health": "Look",
        },
        ("tasks/jobs/qualify/*.py",),
    ),
    "measurements.md": Page(
        "Python: measurements of machines",
        "What a [check](checks.md) writes down, and the hardware that it is judged by.",
        {
            "tasks.qualification.measured": "Probe Status RankReport Sweep Row TrainingPoint Measurement read_measurement",
            "tasks.hardware.sku": "Sku load_sku gpus_of",
        },
        ("tasks/jobs/qualify/*.py",),
    ),
}


def source_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def render(name: str) -> str:
    """A page."""
    page = PAGES[name]
    return (
        "\n\n".join(
            [f"# {page.title}", HEAD, page.text, *(part for one in page.modules for part in of_module(page, one))]
        )
        + "\n"
    )


def of_module(page: Page, module: str) -> Iterator[str]:
    path = source_of(module)
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    defined: dict[str, ast.stmt] = {}
    for one in tree.body:
        if isinstance(one, ast.ClassDef | ast.FunctionDef):
            defined[one.name] = one
        elif isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            defined[one.targets[0].id] = one
    place = path.relative_to(ROOT).as_posix()
    yield f"## {module}"
    yield f"[`{place}`](../../{place}): {next(paragraphs(ast.get_docstring(tree) or ''))}"
    for name in page.modules[module].split():
        node = defined[name]
        yield f"### {name}"
        if isinstance(node, ast.ClassDef):
            yield from of_class(node)
        elif isinstance(node, ast.FunctionDef):
            managed = "@contextmanager\n" if "contextmanager" in map(ast.unparse, node.decorator_list) else ""
            yield f"```python\n{managed}{signature(node.name, node)}\n```"
            yield from described(node)
        else:
            yield f"```python\n{ast.get_source_segment(source, node)}\n```"
            after = tree.body[tree.body.index(node) + 1]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                yield prose(str(after.value.value))


def of_class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    made = [
        signature(node.name, one) for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
    ]
    yield "\n".join(["```python", f"class {node.name}{f'({bases})' if bases else ''}", *made, "```"])
    yield from described(node)
    if members := [*fields(node), *methods(node)]:
        yield "\n".join(members)


def fields(node: ast.ClassDef) -> Iterator[str]:
    """Each attribute with its annotation, its default, and the docstring below it."""
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant) and not ast.unparse(one).startswith("_"):
            yield f"- `{ast.unparse(one)}`"
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name) or one.target.id.startswith("_"):
            continue
        text = ast.unparse(one.annotation)
        default = default_of(one.value)
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        meaning = f": {prose(str(after.value.value))}" if documented else ""
        yield f"- `{one.target.id}: {text}{f' = {default}' if default else ''}`{meaning}"


def default_of(value: ast.expr | None) -> str:
    """A default as a reader needs it: of pydantic's and dataclasses' `Field(...)` what it sets."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("Field", "field"):
        named = {word.arg: word.value for word in value.keywords}
        made = named.get("default_factory")
        value = value.args[0] if value.args else named.get("default")
        if made is not None:
            return ast.unparse(made.body) if isinstance(made, ast.Lambda) else f"{ast.unparse(made)}()"
    return "" if value is None or ast.unparse(value) == "..." else ast.unparse(value)


def methods(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if not isinstance(one, ast.FunctionDef) or one.name.startswith("_"):
            continue
        marks = {ast.unparse(mark) for mark in one.decorator_list}
        returns = f" -> {ast.unparse(one.returns)}" if one.returns else ""
        shown = f"{one.name}{returns}" if "property" in marks else f"{one.name}({', '.join(arguments(one))}){returns}"
        meaning = " ".join(paragraphs(ast.get_docstring(one) or ""))
        yield f"- `{shown}`{f': {meaning}' if meaning else ''}"


def signature(name: str, node: ast.FunctionDef) -> str:
    """On one line, or a line an argument where that is too long; of `__init__` what calls it."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name == node.name else ""
    whole = f"{name}({', '.join(arguments(node))}){returns}"
    if len(whole) <= WIDTH:
        return whole
    each = "".join(f"    {one},\n" for one in arguments(node))
    return f"{name}(\n{each}){returns}"


def arguments(node: ast.FunctionDef) -> list[str]:
    """One by one, with `/` and `*` where they stand, without `self` and `cls`."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    out = [argument(one, default) for one, default in zip(plain, defaults, strict=True)]
    if given.posonlyargs:
        out.insert(len(given.posonlyargs), "/")
    if given.vararg:
        out.append(f"*{argument(given.vararg)}")
    elif given.kwonlyargs:
        out.append("*")
    out += [argument(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    out += [f"**{argument(given.kwarg)}"] if given.kwarg else []
    return out[1:] if out[:1] in (["self"], ["cls"]) else out


def argument(one: ast.arg, default: ast.expr | None = None) -> str:
    named = f"{one.arg}: {ast.unparse(one.annotation)}" if one.annotation else one.arg
    return named if default is None else f"{named} = {ast.unparse(default)}"


def described(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """The docstring, with the arguments that it describes below `Args:` as a list."""
    text, _, args = (ast.get_docstring(node) or "").partition("\nArgs:\n")
    yield from paragraphs(text)
    if args:
        yield "\n".join(f"- {prose(one)}" for one in re.split(r"\n(?=    \w+: )", args))


def paragraphs(text: str) -> Iterator[str]:
    for one in re.split(r"\n\s*\n", text):
        if one.strip():
            yield prose(one)


def prose(text: str) -> str:
    """A paragraph of a docstring as Markdown on one line: paths of the repository lead to their files."""
    pieces = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(piece if piece.startswith("`") else linked(piece) for piece in pieces)


def linked(text: str) -> str:
    def link(match: re.Match[str]) -> str:
        path = match[0]
        if not (ROOT / path).exists():
            return f"`{path}`"
        return (
            f"[{Path(path).name}](../{path[5:]})"
            if path.endswith(".md") and path.startswith("docs/")
            else f"[`{path}`](../../{path})"
        )

    text = text.replace("<", "&lt;").replace("*", "&#42;")
    text = re.sub(r"(?<![\w/])__\w+__(?:\.py)?", r"`\g<0>`", text)
    return re.sub(
        r"(?<![\w/])(?:tasks|flows|deployments|docs|docker|CONTRIBUTING)(?:(?:/\w+)+(?:\.\w+)?|\.md)", link, text
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page in PAGES:
        (FOLDER / page).write_text(render(page), encoding="utf-8")
