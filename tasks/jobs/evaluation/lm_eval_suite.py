"""The suite `lm_eval`: tasks of lm-evaluation-harness by name, with their data given as files and no hub in reach.

What runs the harness is lm_eval_run.py, in a process of its own. Here: what it is given, and its results as metrics. YAML that
names Python code (`!function`) is refused: data that a user gives are data. A task of the harness's own may.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from tasks.common.errors import Missing
from tasks.jobs.evaluation.division import OnRankZero
from tasks.jobs.evaluation.heldout import open_documents
from tasks.jobs.evaluation.suites import Bench, Suite, SuiteTimeout, digest_of, place_of

# YAML that a user gives for a task of lm-evaluation-harness: plain data, or refused.
#
# What is looked at are the nodes that YAML itself makes of the text: a tag may be written in many ways, and is one
# then. The other half is in lm_eval_run.py: the harness takes code from its own folder alone.


PLAIN = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")
)
LOADERS = frozenset({"json", "parquet"})
"""What `dataset_path` may say; others of the library `datasets` run what they read, such as `pandas`, which unpickles."""
REFUSED = frozenset({"include", "custom_dataset", "use_prompt", "hf_evaluate"})
"""Keys that read further files as YAML, or call what they name."""
FILE = re.compile(r"[A-Za-z0-9][\w.-]*")
"""A file beside the YAML. `datasets` takes addresses too, and chains of them that copy a file to wherever they say (fsspec)."""
GENERATION = frozenset(
    ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p", "num_beams", "repetition_penalty")
)
"""What `generation_kwargs` may hold: they are handed to transformers' `generate`, where others name code (`custom_generate`)."""
METRIC = re.compile(r"[A-Za-z]\w*")


def check_plain(text: str, *, place: str) -> None:
    """Raise ValueError for what is no YAML, or names code or further YAML. `place` is the file, as errors say it."""
    try:
        nodes = [node for root in yaml.compose_all(text, Loader=yaml.SafeLoader) if root for node in _nodes(root)]
    except yaml.YAMLError as error:
        raise ValueError(f"{place} is no YAML ({error})") from None
    for node in nodes:
        if node.tag not in PLAIN:
            raise ValueError(
                f"{place} names Python code or has a tag ({node.tag}), which given data may not: write it as templates"
            )
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            _check_key(str(key.value), value, place=place)


def _check_key(key: str, value: yaml.Node, *, place: str) -> None:
    if key in REFUSED:
        raise ValueError(f"{place} has `{key}`, which given data may not: write the whole task into one file")
    if key == "dataset_path" and value.value not in LOADERS:
        raise ValueError(f"{place} has dataset_path = {value.value!r:.60}: say json or parquet, and give data_files")
    if key == "metric" and not METRIC.fullmatch(str(value.value)):
        raise ValueError(f"{place} has metric = {value.value!r:.60}, a path: name a metric of the harness")
    if key == "generation_kwargs":
        names = (
            [str(name.value) for name, _ in value.value] if isinstance(value, yaml.MappingNode) else [str(value.value)]
        )
        for name in names:
            if name not in GENERATION:
                raise ValueError(
                    f"{place} has generation_kwargs with {name!r:.60}, which given data may not: "
                    f"there may be {', '.join(sorted(GENERATION))}"
                )
    if key == "dataset_kwargs":
        _check_files(value, place=place)


def _check_files(value: yaml.Node, *, place: str) -> None:
    """Raise ValueError unless all that is asked of the library `datasets` is to read files that lie beside the YAML."""
    payload = value.value if isinstance(value, yaml.MappingNode) else [(value, value)]
    for key, named in payload:
        if key.value != "data_files":
            raise ValueError(f"{place} has `dataset_kwargs` with {key.value!r:.60}: only data_files may be in it")
        for name in _scalars(named):
            if not FILE.fullmatch(name):
                raise ValueError(
                    f"{place} has data_files = {name!r:.60}: name a file that lies beside it, without a folder"
                )


def _scalars(root: yaml.Node) -> Iterator[str]:
    """Every text in a node: of a mapping those of its values, for its keys are names of splits."""
    keys = {id(key) for node in _nodes(root) if isinstance(node, yaml.MappingNode) for key, _ in node.value}
    for node in _nodes(root):
        if isinstance(node, yaml.ScalarNode) and id(node) not in keys:
            yield str(node.value)


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """Every node once, though an alias may name it often, or name what it stands in."""
    left, seen = [root], set()
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            left += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


SETTING = "evaluation.lm_eval"
ROOT = Path(__file__).resolve().parents[3]
YAML = (".yaml", ".yml")


def lm_eval(bench: Bench) -> Suite | None:
    """Every metric of every task as `TASK_METRIC`; `samples` is the number of samples of the shortest task."""
    if not bench.config.lm_eval.tasks:
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise Missing(
            "evaluation.lm_eval.tasks are set, and lm-evaluation-harness is not installed where the model is measured",
            remedy="pip install 'headway[measure]', or leave evaluation.lm_eval.tasks empty.",
        )
    place = place_of(bench, bench.config.lm_eval.data, setting=f"{SETTING}.data")
    with tempfile.TemporaryDirectory(prefix="headway-lm-eval-") as folder:
        gather(place, Path(folder))
        sha256 = digest_of(sorted(Path(folder).iterdir()))
        output = _run(bench, Path(folder))
    if "on_rank_zero" in output:
        raise OnRankZero
    if "error" in output:
        raise ValueError(f"{SETTING}: lm-evaluation-harness ended with {output['error']}; nothing is loaded from a hub")
    suite = suite_of(output)
    return replace(suite, details={**suite.details, "sha256": sha256})


OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
OURS = ("order.json", "said.json")
"""What lies beside them: what is asked of the harness's process, and what it says."""


def gather(place: Path, target: Path) -> None:
    """Lay a task's files side by side: as they are in a folder, and YAML also from where a dataset packs text, by its last name.

    Raises ValueError for YAML that names code, and for a file that would take the place of one of ours.
    """
    if not place.is_dir():
        raise ValueError(f"{SETTING}.data = {place} is a file: give the folder of the tasks' files")
    for path in sorted(place.iterdir()):
        if path.name in OURS:
            raise ValueError(f"{path} has a name of ours: call it otherwise, not {' or '.join(OURS)}")
        if path.suffix in YAML:
            _keep_yaml(target, path.name, path.read_text(encoding="utf-8"))
        elif path.suffix in (".jsonl", ".json", ".parquet"):
            (target / path.name).symlink_to(path.resolve())
            for name, text in _packed(path) if path.suffix == ".jsonl" else ():
                _keep_yaml(target, name, text)


def _keep_yaml(target: Path, name: str, text: str) -> None:
    check_plain(text, place=f"{SETTING}.data: {name}")
    (target / name).write_text(text, encoding="utf-8")


def _packed(path: Path) -> Iterator[tuple[str, str]]:
    """The YAML files that `headway dataset publish` packed into a shard as records of `text` and `path`."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            record = json.loads(line) if '"path"' in line else {}
            name = PurePosixPath(str(record.get("path", ""))).name if isinstance(record, dict) else ""
            if name.endswith(YAML) and isinstance(record.get("text"), str):
                yield name, record["text"]


def _run(bench: Bench, folder: Path) -> dict[str, Any]:
    """What the harness says. Raises SuiteTimeout, and nothing of it is left."""
    config = bench.config.lm_eval
    order = {
        "tasks": list(config.tasks),
        "limit": config.limit,
        "checkpoint": str(bench.rank.inputs["checkpoint"].resolve()),
        "tokenizer": str(_tokenizer(bench.rank.inputs["checkpoint"], folder)),
        "context": bench.context,
        "prefix_token_id": bench.opening[-1],
        "threads": bench.rank.settings["threads"],
        "device": str(bench.model.device),
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "parts": str(bench.division.folder.resolve()) if bench.division.folder else "",
        "rank": bench.division.rank,
        "world_size": bench.division.world_size,
        "place": _meeting_place() if bench.sharded else None,
        "attempt": bench.rank.attempt,
    }
    bench.meet()  # from here on the harness's processes compute together, and these wait
    (folder / "order.json").write_text(json.dumps(order), encoding="utf-8")
    # Without torchrun's variables: accelerate, in the harness, would open a process group of its own with them.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(OF_A_RANK)}
    name = f"lm-eval-{bench.rank.rank}.log" if bench.rank.rank else "lm-eval.log"
    with open(bench.rank.folder / name, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks.jobs.evaluation.lm_eval_run"],
            cwd=folder,
            env={**environment, **_no_hub(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            left = bench.deadline - time.monotonic()
            try:
                process.wait(None if math.isinf(left) else max(left, 0.0))
            except subprocess.TimeoutExpired:
                raise SuiteTimeout from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    path = folder / "said.json"
    if not path.is_file():
        return {"error": f"no result (exit code {process.returncode}): see lm-eval.log of the job"}
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def _tokenizer(checkpoint: Path, folder: Path) -> Path:
    """A copy of the checkpoint's tokenizer that opens every text as the documents are opened which it is measured on."""
    copy = folder / ".tokenizer"
    copy.mkdir()
    for path in checkpoint.glob("*token*.json"):
        shutil.copyfile(path, copy / path.name)
    open_documents(checkpoint, copy)
    return copy


def _meeting_place() -> tuple[str, int]:
    from tasks.jobs.evaluation.sharded import meeting_place  # torch's FSDP2 and accelerate take seconds to import

    return meeting_place()


def _no_hub(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    offline = dict.fromkeys(
        ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1"
    )
    caches = {"HF_HOME": str(folder / ".hf"), "HF_DATASETS_CACHE": str(folder / ".hf" / "datasets")}
    return {**offline, **caches, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}


def suite_of(output: dict[str, Any]) -> Suite:
    """The harness's results as a suite: `acc,none` of arc_easy is `arc_easy_acc`; what is no finite number is left out."""
    metrics: dict[str, float] = {}
    worse: list[str] = []
    for task, values in sorted(output["results"].items()):
        for name, value in sorted(values.items()):
            metric, _, chosen = name.partition(",")
            if not chosen or not math.isfinite(value):
                continue
            label = re.sub(r"\W", "_", f"{task}_{metric}" if chosen == "none" else f"{task}_{metric}_{chosen}")
            metrics[label] = float(value)
            if (
                output["higher_is_better"].get(task, {}).get(metric.removesuffix("_stderr")) is False
                or "stderr" in metric
            ):
                worse.append(label)
    samples = output["samples"]
    details = {"samples": samples, "versions": output["versions"]}
    return Suite(metrics, min(samples.values(), default=0), lower_is_better=tuple(worse), details=details)
