"""The process that runs lm-evaluation-harness for tasks/jobs/evaluation/lm_eval_suite.py: an order in, `said.json` out.

A process of its own: it is killed when its time is up, its working folder is that of the data, so that a task's YAML names files
relative to itself, and the hub is switched off before anything of it is imported (its environment is the suite's).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tasks.jobs.evaluation.division import Division, OnRankZero

BOOTSTRAP = 1000
"""Draws for the standard error of metrics that are no mean; that of a mean is computed."""


def main() -> int:
    """Read `order.json` of the working folder, run the tasks, write `said.json`: results or an error."""
    order = json.loads(Path("order.json").read_text(encoding="utf-8"))
    try:
        output = _run(order)
    except OnRankZero:
        output = {"on_rank_zero": True}
    except Exception as error:  # noqa: BLE001 the end of a process
        output = {"error": f"{type(error).__name__}: {error}"[:2000]}
    Path("said.json.new").write_text(json.dumps(output), encoding="utf-8")
    os.replace("said.json.new", "said.json")
    return 0


def _run(order: dict[str, Any]) -> dict[str, Any]:
    import torch
    from lm_eval import utils
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from tasks.jobs.evaluation.lm_eval_model import DividedModel

    torch.set_num_threads(order["threads"])
    # The harness's templates, but in Jinja's sandbox: a template comes from data, and may not reach Python's inside.
    from jinja2.sandbox import SandboxedEnvironment

    held = SandboxedEnvironment(loader=utils.env.loader, undefined=utils.env.undefined, keep_trailing_newline=True)
    held.filters.update(utils.env.filters)
    utils.env = held
    _hold_functions()
    own = TaskManager(include_path=str(Path.cwd()), include_defaults=False)
    manager = own
    if known := [name for name in order["tasks"] if name not in own.all_tasks]:
        manager = TaskManager(include_path=str(Path.cwd()))
        if unknown := sorted(set(known) - set(manager.all_tasks)):
            raise ValueError(
                f"no task is called {', '.join(unknown)}; own tasks of the data: {own.all_tasks or 'none'}"
            )
    network, lockstep = _sharded(order) if order["place"] else (order["checkpoint"], None)
    division = Division(
        Path(order["parts"]) if order["parts"] else None,
        order["rank"],
        order["world_size"],
        **({"idle": lockstep.idle} if lockstep else {}),
    )
    model = DividedModel(
        division,
        pretrained=network,
        tokenizer=order["tokenizer"],
        device=order["device"],
        dtype=order["dtype"],
        batch_size=8,
        max_length=order["context"],
        prefix_token_id=order["prefix_token_id"],
    )
    index = manager.task_index
    tasks = [name if name in own.all_tasks else _with_files(name, index[name].yaml_path) for name in order["tasks"]]
    try:
        result = simple_evaluate(
            model=model,
            tasks=tasks,
            limit=order["limit"] or None,
            task_manager=manager,
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
        )
    except OnRankZero:
        if lockstep:
            lockstep.meet()
        raise
    if lockstep:
        lockstep.meet()
    assert result is not None, "this process has rank 0"
    # What the suite needs of the harness's results, as plain JSON.
    results = {
        task: {name: value for name, value in values.items() if isinstance(value, int | float)}
        for task, values in result["results"].items()
    }
    samples = {task: int(counts["effective"]) for task, counts in result.get("n-samples", {}).items()}
    better = {task: dict(entry) for task, entry in result.get("higher_is_better", {}).items()}
    versions = {task: str(version) for task, version in result.get("versions", {}).items()}
    return {"results": results, "samples": samples, "higher_is_better": better, "versions": versions}


def _sharded(order: dict[str, Any]) -> tuple[Any, Any]:
    """The network of which the harness's process of each rank holds its share, and what keeps them in step."""
    import torch

    from tasks.jobs.evaluation.sharded import Lockstep, load_sharded, open_group

    device, name = torch.device(order["device"]), f"lm-eval-{order['attempt']}"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    open_group(device, name=name, rank=order["rank"], world_size=order["world_size"], place=tuple(order["place"]))
    network = load_sharded(Path(order["checkpoint"]), dtype=getattr(torch, order["dtype"]), device=device)
    return network, Lockstep(network)


def _hold_functions() -> None:
    """`!function` in the harness's own tasks alone: what is named elsewhere is not imported, however the YAML got here."""
    from lm_eval.tasks import _yaml_loader as loader

    own, resolve = Path(loader.__file__).resolve().parent, loader._import_func_in_yml

    def held(qual: str, base_dir: Path) -> Any:
        if not Path(base_dir).resolve().is_relative_to(own):
            raise ValueError(f"{qual} is Python code, which data may not name (YAML in {base_dir})")
        return resolve(qual, base_dir)

    loader._import_func_in_yml = held


def _with_files(name: str, yaml: Path | None) -> str:
    """The path of a task's own YAML: the harness's, with the splits from `NAME.SPLIT.jsonl`."""
    ending = ".jsonl"
    files = {
        path.name.removeprefix(f"{name}.").removesuffix(ending): path for path in Path.cwd().glob(f"{name}.*{ending}")
    }
    if yaml is None or not files:
        raise ValueError(f"the data have neither a YAML of the task {name} nor a file {name}.SPLIT{ending}")
    given = {split: str(path) for split, path in sorted(files.items())}
    payload = {"include": str(yaml), "task": name, "dataset_path": "json", "dataset_name": None}
    path = Path.cwd() / f"{name}.from-files.yaml"
    path.write_text(json.dumps({**payload, "dataset_kwargs": {"data_files": given}}), encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
