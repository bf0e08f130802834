"""What a server is started with: `serve.json` in its folder, written by whoever starts it (tasks/serving, docker/endpoint.sh).

Fields that it does not know are left alone: who starts a server may be newer than it is.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tasks.common.errors import Missing
from tasks.common.process import read_json
from tasks.config.access import AccessConfig
from tasks.config.base import digest
from tasks.config.serving import AnswersConfig, LimitsConfig
from tasks.formats.variants import smaller_rungs
from tasks.jobs.serving.fallback_models import Rung, RungName
from tasks.jobs.serving.runtime import Golden
from tasks.storage.manifest import Content, FileEntry, Manifest


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class GoldenSettings(_Read):
    """A prompt with the greedy answer that proves a model."""

    prompt: str
    tokens: tuple[int, ...]


class RungSettings(_Read):
    """One model that may answer."""

    name: RungName
    model_ref: str
    folder: Path
    files: tuple[FileEntry, ...] | None = None
    """None: whoever mounted the folder has verified it."""
    golden: tuple[GoldenSettings, ...] = ()
    """Empty: those of golden.json in the folder."""
    unless: Path | None = None
    """It answers nothing while this file is there."""


class ServeSettings(_Read):
    """The whole file."""

    model_folder: Path
    model_ref: str
    files: tuple[FileEntry, ...] | None
    port: int
    outputs: Path
    manifest: Path | None = None
    """Where there is no `files`: the manifest of the version that `model_ref` names; what it says of files must hold."""
    content: Content | None = None
    """The same, without a file."""
    threads: int = 1
    ladder: tuple[RungSettings, ...] = ()
    """Rungs below the model itself, the best first."""
    variants: bool = False
    """Whether the variants that lie in the model's folder are rungs below those: for who mounts a model and knows no more."""
    hang_seconds: float = 30.0
    limits: LimitsConfig = LimitsConfig()
    answers: AnswersConfig = AnswersConfig()
    access: AccessConfig = AccessConfig()
    keys: Path | None = None
    """keys.json of the endpoint; it need not be there."""
    secret: Path | None = None
    """File of the endpoint's secret, which the gateway before it shows; None: nothing is asked for on the private port."""
    alone: bool = False
    """Whether nothing stands before it: it is its own edge, on the address of `access`. Else `port` is private, on loopback."""

    def rungs(self) -> list[Rung]:
        """The model itself, then what answers when it cannot."""
        below = [one for one in self.ladder if one.name != "full"]
        files = self._files()
        full = RungSettings(name="full", model_ref=self.model_ref, folder=self.model_folder, files=files)
        if self.variants:
            entries = None if files is None else [file.model_dump() for file in files]
            result = smaller_rungs(self.model_folder, self.model_ref, entries)
            below += [RungSettings.model_validate(one) for one in result]
        return [_rung(one) for one in (full, *below)]

    def _files(self) -> tuple[FileEntry, ...] | None:
        """What each file must be. Raises ValueError for a version that is named and of which nobody says what it holds."""
        version = self.model_ref.partition("@")[2]
        if self.files is not None or not version:
            return self.files
        content = self.content
        if content is None and self.manifest is not None and self.manifest.is_file():
            content = Manifest.model_validate_json(self.manifest.read_bytes()).content
        if content is None or digest(content.model_dump(mode="json")) != version:
            text = "there is no manifest" if content is None else "the manifest is of another version"
            raise ValueError(
                f"{self.model_ref} cannot be verified, {text}: mount the whole version, with its manifest.json"
            )
        return content.files


def read_settings(folder: Path) -> ServeSettings:
    """The settings of a server's folder. Raises Missing without them."""
    output = read_json(folder / "serve.json")
    if output is None:
        raise Missing(
            f"{folder} holds no serve.json", remedy="Servers are started by `headway retrain`, or by the container."
        )
    return ServeSettings.model_validate(output)


def _rung(one: RungSettings) -> Rung:
    golden = tuple(Golden(prompt=each.prompt, tokens=each.tokens) for each in one.golden)
    return Rung(
        name=one.name, model_ref=one.model_ref, folder=one.folder, files=one.files, golden=golden, unless=one.unless
    )
