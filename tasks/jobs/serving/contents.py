"""The files of a model's folder, read once into memory of this process and compared with their digests on the way.

What is loaded is what was compared: the model is made from these bytes, no file is opened again. So a file that is changed a
moment after it was verified is not in the model, and is found at the next start. Costs the size of the weights while the
model is made (ONNX Runtime copies), none afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.common.errors import IntegrityError
from tasks.storage.manifest import FileEntry, check

Contents = Mapping[str, bytes | bytearray]
"""Bytes of the files at a folder's root, by name."""


def read_contents(folder: Path, files: Sequence[FileEntry] | None, *, named: str = "") -> dict[str, bytearray]:
    """The files at the root of a folder. Raises IntegrityError when any byte below the folder is not what `files` says.

    None for `files`: whoever mounted the folder has verified it. Raises ValueError when the folder is no folder.
    """
    if files is None:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: name the one that was exported")
        return {path.name: bytearray(path.read_bytes()) for path in sorted(folder.iterdir()) if path.is_file()}
    contents = {entry.path: bytearray() for entry in files if "/" not in entry.path}
    problems = check(folder, files, copies={path: kept.extend for path, kept in contents.items()})
    if problems:
        text = ", ".join(f"{problem.path} ({problem.problem})" for problem in problems[:5])
        raise IntegrityError(
            f"the files of {named or folder} are not what was deployed: {text}",
            problems=[problem.model_dump() for problem in problems],
        )
    return contents
