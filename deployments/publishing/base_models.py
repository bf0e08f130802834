"""A model that others trained becomes a checkpoint version, and its tokenizer one that the checkpoint is made from.

The core of `headway checkpoint publish`; who may, is asked there. What a folder must be: tasks/formats/model_folder.py.
See docs/fine-tuning.md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.common.errors import Missing
from tasks.config.base import digest
from tasks.data.tokenizing.tokenizer import OpenedTokenizer, open_tokenizer
from tasks.formats.model_folder import INDEX, open_model_folder, require_trainable
from tasks.registry.versions import publish, publish_for_signing
from tasks.security.signatures import require_signer, sign
from tasks.storage.manifest import Manifest, Provenance
from tasks.storage.store import Store

if TYPE_CHECKING:
    from deployments.publishing.hugging_face import Hub

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
OTHERS = ("config.json", "generation_config.json", INDEX, *TOKENIZER_FILES, "README.md", "LICENSE", "LICENSE.txt")
"""What is taken beside the weights, where it is there."""


class Made(NamedTuple):
    """What was published."""

    checkpoint: Manifest
    tokenizer: Manifest
    architecture: str
    parameters: int
    key: str
    """That signed the checkpoint."""


def from_hub(store: Store, home: Path, name: str, address: str, hub: Hub) -> Made:
    """Publish a model of the Hugging Face hub as a checkpoint: as `make_base`, of the commit that its address stands for now.

    Its settings are judged before its weights are downloaded. Raises as `Hub.open`, `model_files` and `make_base` do.
    """
    from deployments.publishing.hub_files import model_files, weights

    require_signer(home, "checkpoint", name)
    source = hub.open(address, "model")
    files = model_files(source)
    with hub.fetched(source, files, home / "work") as folder:
        if files[0].path.endswith(".gguf"):
            return make_base(store, home, name, folder / files[0].path, origin=source.origin())
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        require_trainable(config, source.uri("config.json"))
        index = folder / INDEX
        shards = weights(source, json.loads(index.read_text(encoding="utf-8")) if index.is_file() else None)
        hub.fetch(source, (*files, *shards), folder)
        return make_base(store, home, name, folder, origin=source.origin())


def make_base(store: Store, home: Path, name: str, path: Path, *, origin: Mapping[str, Any] | None = None) -> Made:
    """Publish a Hugging Face folder, or a .gguf file, as a checkpoint under its tokenizer, and sign it.

    `origin` is what the provenance keeps of a repository on the hub; the folder is this process's own then. Raises ValueError
    for what training could not start from, IntegrityError when the trust policy lets this home sign nothing of that name.
    """
    require_signer(home, "checkpoint", name)
    work = home / "work"
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as temporary, _folder_of(path, Path(temporary)) as folder:
        result = open_model_folder(folder)
        opened = open_tokenizer(folder)
        opened.require_eod()
        if opened.vocab_size > result.vocab_size:
            raise ValueError(
                f"the tokenizer of {folder} has {opened.vocab_size} words, its model {result.vocab_size}: "
                "they do not belong together"
            )
        tokenizer = publish(
            store,
            _tokenizer_folder(folder, opened, Path(temporary)),
            kind="tokenizer",
            inputs=(),
            provenance=_told(name, origin),
        )
        made, link = Path(temporary) / "checkpoint", bool(origin) and path.is_dir()
        made.mkdir()
        for file in (*result.shards, *OTHERS):
            if (folder / file).is_file():
                (os.link if link else shutil.copyfile)(folder / file, made / file)
        checkpoint = publish_for_signing(
            store,
            home,
            made,
            kind="checkpoint",
            inputs=(tokenizer.version,),
            provenance=_told(name, origin, tokenizer.ref),
        )
    statement = sign(store, home, checkpoint)
    return Made(checkpoint, tokenizer, result.config["architectures"][0], result.parameters, statement.key)


@contextmanager
def _folder_of(path: Path, work: Path) -> Iterator[Path]:
    """The folder itself, or what a .gguf file holds."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; name a Hugging Face folder or a .gguf file")
    if path.is_dir():
        yield path
        return
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is neither a folder nor a .gguf file; name a Hugging Face folder or a .gguf file")
    made = work / "made"
    convert(path, made)
    yield made


def convert(file: Path, folder: Path) -> None:
    """Make a Hugging Face folder of a .gguf file, in a process of its own: the orchestrator has no torch in it."""
    # -P: nothing is imported from the folder that somebody's command was typed in.
    argv = [sys.executable, "-P", "-m", "tasks.jobs.gguf_folder", str(file.resolve()), str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if "ModuleNotFoundError" in last:
        raise Missing(
            f"{file} needs transformers and gguf to be read: {last}",
            remedy="Install them: pip install 'headway[train]'. Or give a Hugging Face folder.",
        )
    raise ValueError(f"{file} cannot be made a Hugging Face folder: {last.removeprefix('ValueError: ')}")


def _tokenizer_folder(folder: Path, opened: OpenedTokenizer, work: Path) -> Path:
    """The tokenizer by itself, encoding as it does in the model's folder: there transformers also looks at config.json."""
    made = work / "tokenizer"
    made.mkdir()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, made / name)
    if not (made / "tokenizer.json").is_file() or open_tokenizer(made).digest != opened.digest:
        (made / "tokenizer.json").write_text(opened.rules, encoding="utf-8")
        settings = made / "tokenizer_config.json"
        output = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        output["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings.write_text(json.dumps(output, indent=1), encoding="utf-8")
    if open_tokenizer(made).digest != opened.digest:
        raise ValueError(
            f"the tokenizer of {folder} encodes otherwise without the model beside it: save it with save_pretrained of "
            "transformers, and publish that folder"
        )
    return made


def _told(name: str, origin: Mapping[str, Any] | None, *inputs: str) -> Provenance:
    config = {"origins": [dict(origin)]} if origin else None
    return Provenance(
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        stage="publish",
        inputs=inputs,
        config=config,
        config_digest=digest(config) if config else None,
    )
