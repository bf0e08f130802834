"""An exported model as an MLflow model: a folder with code, signature and addresses, which any environment of MLflow's can load.

The code is Headway's own, copied as the package `headway_model`: tasks/jobs/serving/mlflow_model.py and what it imports. So the
answers are the endpoint's, an environment needs no Headway, and a package of somebody's that is called `tasks` is not hidden.
The weights stay in the store, unless they are handed in. Imported on use: mlflow.pyfunc is slow. See docs/lineage.md.
"""

from __future__ import annotations

import ast
import re
import shutil
from importlib import metadata
from pathlib import Path

import mlflow.pyfunc
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

PACKAGE = "headway_model"
PROGRAM = "tasks.jobs.serving.mlflow_model"
ROOT = Path(__file__).resolve().parents[2]
RUNS_ON = ("numpy", "pydantic", "cryptography", "onnxruntime", "onnxruntime-genai")
BLOB = ("azure-storage-blob", "azure-identity")
SETTINGS = {"key": "", "weights": "", "threads": 0}
"""What `model_config` of `load_model` may change: MLflow passes on no other name."""
SIGNATURE = ModelSignature(
    inputs=Schema([ColSpec(DataType.string)]),
    outputs=Schema([ColSpec(DataType.string)]),
    params=ParamSchema([ParamSpec("max_tokens", DataType.long, 64), ParamSpec("temperature", DataType.double, 0.0)]),
)


def write_model_folder(folder: Path, data: Path, *, weights: Path | None, model: Model) -> None:
    """Write an MLflow model into `folder`, which must not exist.

    `data` holds what tasks/registry/logged_model.py lays down of it. `weights` is the model's own folder where its files are to
    be part of the MLflow model. Raises OSError when one of the two is gone.
    """
    code, given = folder.with_name("code"), folder.with_name("headway")
    shutil.copytree(data, given)
    if weights:
        (given / "weights").mkdir()
        for path in weights.iterdir():
            if path.is_file():
                shutil.copyfile(path, given / "weights" / path.name)
    for source in _sources(PROGRAM):
        target = code / PACKAGE / source.relative_to(ROOT / "tasks")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            source.read_text(encoding="utf-8").replace("from tasks.", f"from {PACKAGE}."), encoding="utf-8"
        )
    for package in {parent for path in code.rglob("*.py") for parent in path.parents if parent.is_relative_to(code)} - {
        code
    }:
        (package / "__init__.py").touch()
    # Headway's own bounds of what the program runs on
    blob = "az://" in (data / "places.json").read_text()
    known = [text.partition(";")[0].strip() for text in metadata.requires("headway") or []]
    wanted = RUNS_ON + (BLOB if blob else ())
    requirements = [next((text for text in known if re.match(rf"{name}\b(?!-)", text)), name) for name in wanted]
    mlflow.pyfunc.save_model(
        folder,
        loader_module=PROGRAM.replace("tasks.", f"{PACKAGE}.", 1),
        data_path=str(given),
        code_paths=[str(code / PACKAGE)],
        mlflow_model=model,
        signature=SIGNATURE,
        model_config=SETTINGS,
        pip_requirements=[f"mlflow=={mlflow.__version__}", *requirements],
    )


def _sources(program: str) -> set[Path]:
    """The files of a program and of all modules of ours that it imports as it starts."""
    results, waiting = set(), [program]
    while waiting:
        path = ROOT / (waiting.pop().replace(".", "/") + ".py")
        if path in results:
            continue
        results.add(path)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tasks."):
                package = (ROOT / str(node.module).replace(".", "/")).is_dir()
                waiting += [f"{node.module}.{name.name}" for name in node.names] if package else [str(node.module)]
    return results
