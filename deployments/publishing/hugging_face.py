"""The Hugging Face hub: what an address stands for, files of one commit brought here and compared, a folder sent there.

One vendor, one file: nothing else imports huggingface_hub. Which files a dataset or a model is made of is decided by
hub_files.py, what becomes of them by datasets.py and base_models.py, what is sent by pushing.py.

An address is `hf://datasets/ORG/NAME[@REVISION][/PATH]` or `hf://ORG/NAME[@REVISION][/PATH]`, as
https://huggingface.co/docs/huggingface_hub/package_reference/hf_uris has them. The server is HF_ENDPOINT's, the token
HF_TOKEN's or that of `hf auth login`: both are huggingface_hub's own. No error repeats an address that the hub redirected to,
for it may be signed. See docs/hugging-face.md.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, parse_hf_uri
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HfUriError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import disable_progress_bars

from tasks.common.errors import Conflict, IntegrityError, Missing, Unknown
from tasks.common.process import locked
from tasks.common.redaction import redact
from tasks.formats.model_card import license_in
from tasks.storage.cache import require_room
from tasks.storage.manifest import require_inside

SCHEME = "hf://"
MAIN = "main"
TIMEOUT = 30.0
"""Seconds that the hub may take to answer what a repository is."""
TRIES = 4
LONGEST_WAIT = 60
"""Seconds that the hub may ask us to wait for; where it says nothing, a second, then twice as long."""
KEPT = ".gitattributes"
"""The hub's own file in a repository: it says which files are large."""
T = TypeVar("T")


class File(NamedTuple):
    """A file of a commit, and what its bytes must be."""

    path: str
    size: int
    blob: str
    """sha1 as git has it, of the bytes or, of a large file, of what points at them."""
    sha256: str
    """Of a large file; empty for others."""

    def is_of(self, path: Path) -> bool:
        """Whether these are the bytes of a file here."""
        if path.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest() == (self.sha256 or self.blob)


@dataclass(frozen=True)
class Source:
    """A repository at one commit."""

    kind: str
    """dataset or model."""
    repo: str
    asked: str
    """The branch, tag or commit that was asked for."""
    commit: str
    path: str
    """The path or pattern in the address; empty for all of it."""
    license: str
    """As the card of the repository has it; empty where it says nothing."""
    gated: bool
    endpoint: str
    card: Mapping[str, Any]
    files: tuple[File, ...]

    @property
    def name(self) -> str:
        """The address without a revision."""
        return f"{SCHEME}{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"

    def uri(self, path: str = "") -> str:
        """The address of the commit, or of a file in it."""
        return f"{self.name}@{self.commit}{f'/{path}' if path else ''}"

    def origin(self) -> dict[str, Any]:
        """What the provenance of a version says of it."""
        terms = {"license": self.license} if self.license else {}
        return {"uri": self.uri(), "revision": self.asked, "endpoint": self.endpoint, "gated": self.gated, **terms}


class Hub:
    """The hub, as this process reaches it. `endpoint` is for another server than HF_ENDPOINT's."""

    def __init__(self, *, endpoint: str = "") -> None:
        self.api = HfApi(endpoint=endpoint or None, library_name="headway")
        if not sys.stderr.isatty():
            disable_progress_bars()

    def open(self, address: str, kind: str) -> Source:
        """What an address stands for now: the branch or tag resolved to a commit, and all files of it.

        Raises ValueError for an address of another form or kind, Unknown for a repository, revision or path that is not there,
        Missing when the hub is away, asks for a token, or does not let this one in.
        """
        kind, repo, named, path = split(address, kind)
        asked = named or MAIN
        page = f"{self.api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"
        with plainly(f"{kind} {repo}", page, asked):
            about = self.api.dataset_info if kind == "dataset" else self.api.model_info
            info: Any = self._patiently(lambda: about(repo, revision=asked, timeout=TIMEOUT))
            commit = str(info.sha)
            tree = self.api.list_repo_tree(repo, recursive=True, revision=commit, repo_type=kind)
            files = tuple(file_of(entry) for entry in tree if isinstance(entry, RepoFile))
        require_inside((file.path for file in files), where=page)
        card = info.card_data.to_dict() if info.card_data else {}
        return Source(
            kind=kind,
            repo=repo,
            asked=asked,
            commit=commit,
            path=path,
            license=license_in(card),
            gated=bool(info.gated),
            endpoint=redact(self.api.endpoint),
            card=card,
            files=files,
        )

    @contextmanager
    def fetched(self, source: Source, files: Sequence[File], work: Path) -> Iterator[Path]:
        """A folder below `work` with these files of a commit, one downloaded after the other, each compared with what the hub
        says of it. It is deleted at the end; what had arrived when the hub went away is kept, and not downloaded again.

        Raises IntegrityError for other bytes, Missing when the hub is away or lets nobody in, or the disk has no room.
        """
        name = f"{source.kind}-{source.repo.replace('/', '--')}-{source.commit[:12]}"
        folder = work / "hub" / name
        with locked(work / "hub" / f"{name}.lock"):
            folder.mkdir(parents=True, exist_ok=True)
            self.fetch(source, files, folder)
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def fetch(self, source: Source, files: Sequence[File], folder: Path) -> None:
        """Download files into a folder; of what is there already, only files that are whole stay."""
        wanted = {folder / file.path for file in files}
        for path in folder.rglob("*"):
            if path not in wanted and path.relative_to(folder).parts[0] != ".cache" and not path.is_dir():
                path.unlink()
        places = [(file, folder / file.path) for file in files]
        waiting = [f for f, path in places if not path.is_file() or path.is_symlink() or not f.is_of(path)]
        require_room(folder, sum(file.size for file in waiting), what=source.uri())
        page = f"{self.api.endpoint}/{'datasets/' if source.kind == 'dataset' else ''}{source.repo}"
        with plainly(f"{source.kind} {source.repo}", page, source.asked):
            for file in waiting:
                arrived = self.api.hf_hub_download(
                    source.repo,
                    file.path,
                    repo_type=source.kind,
                    revision=source.commit,
                    local_dir=folder,
                    cache_dir=folder / ".cache",
                )
                if not file.is_of(Path(arrived)):
                    Path(arrived).unlink()
                    raise IntegrityError(
                        f"{source.uri(file.path)} arrived with other bytes than the hub lists for it",
                        problems=[{"path": file.path, "problem": "sha256", "expected": file.sha256 or file.blob}],
                        remedy="Nothing was published. Try again; a mirror (HF_ENDPOINT) may hold a damaged copy.",
                    )

    def branches(self, repo: str) -> tuple[str, ...] | None:
        """The branches of a model's repository; None when there is no such repository, or this token may not see it."""
        with plainly(f"model {repo}", f"{self.api.endpoint}/{repo}", MAIN):
            try:
                return tuple(branch.name for branch in self._patiently(lambda: self.api.list_repo_refs(repo)).branches)
            except RepositoryNotFoundError as error:
                if isinstance(error, GatedRepoError):
                    raise
                return None

    def create(self, repo: str, *, private: bool) -> None:
        """Make a repository for a model."""
        with plainly(f"model {repo}", f"{self.api.endpoint}/{repo}", MAIN):
            self.api.create_repo(repo, private=private, repo_type="model")

    def branch(self, repo: str, name: str) -> None:
        """Make a branch of a model's repository where its main branch is."""
        with plainly(f"model {repo}", f"{self.api.endpoint}/{repo}", MAIN):
            self.api.create_branch(repo, branch=name)

    def push(
        self, onto: Source, files: Mapping[str, Path], *, message: str, description: str, deleted: Iterable[str] = ()
    ) -> str:
        """Send files, by their paths there, as one commit on top of `onto`, where nobody has committed since; returns the commit.

        Raises Conflict when somebody has, ValueError when the hub does not take the card, Missing as `open` does.
        """
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(name, path) for name, path in files.items()),
            *(CommitOperationDelete(name) for name in deleted),
        ]
        with plainly(f"model {onto.repo}", f"{self.api.endpoint}/{onto.repo}", onto.asked):
            made = self.api.create_commit(
                onto.repo,
                operations,
                commit_message=message,
                commit_description=description,
                revision=onto.asked,
                parent_commit=onto.commit,
            )
        return str(made.oid)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask, and again as the hub says when it is busy: of this request huggingface_hub does not take care itself."""
        for number in range(TRIES):
            try:
                return ask()
            except HfHubHTTPError as error:
                status = error.response.status_code
                after = error.response.headers.get("Retry-After", "")
                wait = int(after) if after.isdigit() else 2**number
                if (status != 429 and status < 500) or number == TRIES - 1 or wait > LONGEST_WAIT:
                    raise
                time.sleep(wait)
        raise AssertionError


def split(address: str, kind: str = "") -> tuple[str, str, str, str]:
    """Kind, repository, revision and path of an address, the last two empty where it names none.

    Raises ValueError for another form, or another kind than this one.
    """
    wanted = f"{SCHEME}{'datasets/' if kind == 'dataset' else ''}ORG/NAME[@REVISION][/PATH]"
    try:
        uri = parse_hf_uri(address if address.startswith(SCHEME) else address.replace("hf:/", SCHEME, 1))
    except HfUriError as error:
        raise ValueError(f"{address!r} is no address of the Hugging Face hub: {error.msg} Write {wanted}") from None
    if kind and uri.type != kind:
        raise ValueError(f"{address} names a {uri.type}, and a {kind} is needed here: write {wanted}")
    return uri.type, uri.id, uri.revision or "", uri.path_in_repo


def file_of(entry: RepoFile) -> File:
    """A file as the hub lists it."""
    return File(entry.path, entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else "")


@contextmanager
def plainly(name: str, page: str, revision: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into our errors: what is wrong, and what to do about it."""
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{error}; write ORG/NAME as the hub has it") from None
    except (HfHubHTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, httpx2.HTTPError) as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        raise _named(cause, name, page, revision) or _answered(cause, name, page) from None


def _named(error: BaseException | None, name: str, page: str, revision: str) -> Exception | None:
    """Our error for one that the hub has a name for."""
    if isinstance(error, GatedRepoError):
        return Missing(
            f"{name} is gated: its owner lets in those who have accepted its terms, and this token is of none of them",
            remedy=f"Accept the terms at {page}, and set HF_TOKEN to a token of the same account that may read gated "
            "repositories (https://huggingface.co/settings/tokens).",
        )
    if isinstance(error, RepositoryNotFoundError):
        return Unknown(
            f"there is no {name} at {page}, or it is private and this token may not see it",
            remedy="Look for a typing mistake. For a private one set HF_TOKEN to a token that may read it.",
        )
    if isinstance(error, RevisionNotFoundError):
        return Unknown(
            f"{name} has no revision {revision!r}",
            remedy=f"{page}/tree/{MAIN} lists its branches and tags; without @REVISION it is {MAIN}.",
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return Unknown(f"a file of {name} is gone", remedy="Its history was rewritten meanwhile; start again.")
    if isinstance(error, DisabledRepoError):
        return Missing(f"{name} was disabled by the hub or by its owner", remedy=f"{page} says why.")
    if isinstance(error, OfflineModeIsEnabled):
        return Missing(
            f"{name} is on the Hugging Face hub, and HF_HUB_OFFLINE is set",
            remedy="Unset HF_HUB_OFFLINE for this command; jobs stay offline either way.",
        )
    return None


def _answered(error: BaseException | None, name: str, page: str) -> Exception:
    """Our error for a status, or for no answer at all."""
    if not isinstance(error, HfHubHTTPError):
        return Missing(
            f"{name} cannot be reached: no answer from {page.split('/')[2]}, or the connection broke again and again",
            remedy="Look at the network and its proxy, or set HF_ENDPOINT to a mirror. Files that have arrived are kept.",
        )
    status = error.response.status_code
    if status == 401:
        return Missing(
            f"the hub does not know the token that was sent for {name}",
            remedy="Set HF_TOKEN to a valid one (https://huggingface.co/settings/tokens), or unset it for what is public.",
        )
    if status == 403:
        return Missing(
            f"this token may not do that with {name}",
            remedy=f"Take one with more rights, to read or to write: https://huggingface.co/settings/tokens. See {page}.",
        )
    if status in (409, 412):
        return Conflict(
            f"{name} was changed by somebody else meanwhile", remedy="Nothing was committed. Look at it, and try again."
        )
    if status == 429:
        return Missing(
            f"the hub refuses further requests for {name} for now", remedy="Wait some minutes, and try again."
        )
    return Missing(
        f"the hub answered {status} for {name}", remedy="Try again; https://status.huggingface.co says more."
    )
