"""Which files of a repository on the Hugging Face hub are a dataset, or a model to start from. Pure: a listing in, files out.

A dataset is what its address names: a file, or what of a folder or a pattern is JSON lines, Parquet or text. An address without
a path stands for all such files, if they are one split: a training split and a test split are not mixed silently. See
docs/hugging-face.md.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from deployments.publishing.base_models import OTHERS
from deployments.publishing.hugging_face import File, Source
from tasks.common.errors import Unknown
from tasks.data.corpus.inputs import ENDINGS
from tasks.formats.model_folder import INDEX, PICKLES

READ = (*ENDINGS, ".json", ".txt")
"""Endings of files that are data where nobody named them."""
FOREIGN = (".csv", ".tsv", ".arrow", ".zip", ".tar", ".tar.gz", ".tgz", ".h5", ".feather", ".xlsx")
"""Containers that are not read."""
UNSAFE = (*PICKLES, ".pickle", ".npy", ".npz", ".joblib")
CONVERTED = "refs/convert/parquet"
"""The branch with the hub's own conversion of a dataset to Parquet."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names of files, and the split that they mean: those that the package `datasets` looks for."""
SHOWN = 6


def data_files(source: Source) -> tuple[File, ...]:
    """The files that an address means, in the order of their paths.

    Raises Unknown when a path stands for nothing, ValueError when files are no data that is read, run code when they are opened,
    or are several splits.
    """
    files = {file.path: file for file in source.files}
    if source.path:
        chosen = [path for path in files if _is_below(path, source.path)]
        if not chosen:
            some = ", ".join(list(files)[:SHOWN])
            raise Unknown(f"{source.uri()} has nothing at {source.path!r}", remedy=f"It holds {some or 'no file'}, ...")
        if source.path not in files:  # what lies beside data in a folder is a card, or the hub's own
            chosen = [path for path in chosen if _ends(path, READ) and not _is_hidden(path)] or chosen
        _require_read(chosen, source)
    else:
        chosen = [path for path in files if _ends(path, READ) and not _is_hidden(path)]
        if not chosen:
            _require_read([path for path in files if not _is_hidden(path)], source)
        chosen = _one_split(chosen, source)
    return tuple(files[path] for path in sorted(chosen))


def splits_of(paths: Iterable[str], card: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Patterns of the files of each split: CONFIGURATION/SPLIT as the card has them, else by words in the files' names."""
    declared: dict[str, tuple[str, ...]] = {}
    for config in card.get("configs") or ():
        name, data = config.get("config_name", "default"), config.get("data_files") or ()
        for one in [{"path": data}] if isinstance(data, str) else data:
            one = {"path": one} if isinstance(one, str) else one
            where = one.get("path") or ()
            key = f"{name}/{one.get('split', 'train')}"
            declared[key] = (*declared.get(key, ()), *([where] if isinstance(where, str) else where))
    if declared:
        return declared
    by_name: dict[str, tuple[str, ...]] = {}
    for path in paths:
        words = re.split(r"[^a-z]+", path.lower())
        split = next((split for split, known in SPLITS.items() if any(word in known for word in words)), "")
        if split:
            by_name[split] = (*by_name.get(split, ()), path)
    return by_name


def model_files(source: Source) -> tuple[File, ...]:
    """Settings, tokenizer, card and license of a model; its weights are `weights`. A .gguf file, where the address names one, is
    all of it.

    Raises ValueError when there is no model to start from.
    """
    files = {file.path: file for file in source.files}
    if source.path.endswith(".gguf") and source.path in files:
        return (files[source.path],)
    if source.path:
        raise ValueError(
            f"{source.uri(source.path)}: a model is a whole repository, or one .gguf file in it; leave the path out, or name "
            f"one of {', '.join(path for path in files if path.endswith('.gguf')) or 'no .gguf file'}"
        )
    if "config.json" not in files:
        raise ValueError(f"{source.uri()} has no config.json at its root: it is no model that transformers loads")
    if INDEX not in files and "model.safetensors" not in files:
        pickles = [path for path in files if path.endswith(PICKLES)]
        why = f"only a pickle ({pickles[0]}), which runs code when it is opened" if pickles else "no weights"
        raise ValueError(
            f"{source.uri()} has {why}: Headway reads model.safetensors or {INDEX}. Many repositories have a conversion as a "
            "pull request: write hf://ORG/NAME@refs/pr/NUMBER"
        )
    return tuple(files[path] for path in OTHERS if path in files)


def weights(source: Source, index: Mapping[str, Any] | None) -> tuple[File, ...]:
    """The files of a model's weights; `index` is what INDEX holds, where there is one. Raises ValueError when one is missing."""
    files = {file.path: file for file in source.files}
    named = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    lost = [name for name in named if name not in files]
    if lost:
        raise ValueError(f"{source.uri(INDEX)} names {lost[0]}, and the repository does not have it")
    return tuple(files[name] for name in named)


def _one_split(paths: list[str], source: Source) -> list[str]:
    """The files of the only split. Raises ValueError when there are several."""
    splits = splits_of(paths, source.card)
    if len(splits) > 1:
        lines = [f"{name}: {source.name}@{source.asked}/{_pattern(where)}" for name, where in splits.items()]
        raise ValueError(
            f"{source.uri()} holds {len(splits)} splits, and which one is meant is for you to say. Name one or more: "
            + "; ".join(lines[:SHOWN])
            + ("; ..." if len(lines) > SHOWN else "")
            + f". All files together: {source.name}@{source.asked}/*"
        )
    where = next(iter(splits.values()), ())
    return (
        [path for path in paths if any(_is_below(path, one) for one in where)] if source.card.get("configs") else paths
    )


def _require_read(paths: list[str], source: Source) -> None:
    """Raise ValueError when one of these files is no text, JSON lines or Parquet."""
    for path in paths:
        if _ends(path, UNSAFE):
            raise ValueError(
                f"{source.uri(path)} is a pickle, or may hold one, which runs code when it is opened: name files of JSON lines, "
                "Parquet or text"
            )
    foreign = [path for path in paths if _ends(path, FOREIGN)]
    if foreign or not (source.path or any(_ends(path, READ) for path in paths)):
        script = next((path for path in paths if path.endswith(".py")), "")
        why = (
            f"{foreign[0]} is no JSON lines, Parquet or text" if foreign else "it holds no JSON lines, Parquet or text"
        )
        if not foreign and script:
            why = f"its data is loaded by a program of its own ({script}), which is not run"
        raise ValueError(
            f"{source.uri()}: {why}. Most public datasets have been converted by the hub: {source.name}@{CONVERTED}"
        )


def _pattern(paths: tuple[str, ...]) -> str:
    """A pattern that a person can type for files: the pattern itself, or the part that their names share."""
    if len(paths) == 1:
        return paths[0]
    first, last = min(paths), max(paths)
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return f"{first[:same]}*"


def _is_below(path: str, pattern: str) -> bool:
    """Whether a path is the one, below the folder, or fits the pattern; `*` also stands for a `/`, as in huggingface_hub."""
    return fnmatch.fnmatchcase(path, pattern) or path.startswith(f"{pattern.rstrip('/')}/")


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(path).parts)


def _ends(path: str, endings: tuple[str, ...]) -> bool:
    return path.lower().endswith(endings)
