"""An OpenSSF model-signing bundle: names and digests of all files of a folder, signed. The library makes what is said in it.

Stricter than the library's own verifier: no ignore list (it passes over `.git` by default), no links, no second name of a
file's bytes, no bundle that leaves any of that open. Bytes are compared with digests elsewhere: a store does so whenever it hands
files out, so a bundle that names the same digests as the manifest needs no second reading (tasks/security/signatures.py). The
library is imported on use: it is slow. See https://github.com/sigstore/model-transparency.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tasks.common.errors import IntegrityError
from tasks.signing.keys import Signer, pem_of
from tasks.signing.statement import claimed_payload, seal, unseal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

SIGNATURE = "signature.json"
"""Name under which a bundle is kept beside the artifact that it signs."""


SIGNATURES = "signatures.json"
"""The same for a dataset, whose shards may be signed by several people: a JSON list of bundles."""


MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def sign_folder(folder: Path, signer: Signer) -> bytes:
    """The bundle over every file of a folder, each read once; raises IntegrityError when the folder holds links."""
    from model_signing import hashing

    # Refuse what a signer and a loader could read differently: links, hard links, devices.
    if folder.is_symlink() or not folder.is_dir():
        raise IntegrityError(f"{folder} is no plain folder, and is not signed")
    # Hidden ones too; links are named, never followed.
    paths = [Path(parent) / name for parent, folders, files in os.walk(folder) for name in sorted(folders + files)]
    results = [(path.relative_to(folder).as_posix(), _link_problem(path)) for path in paths]
    problems = [{"path": name, "problem": "link", "said": text} for name, text in results if text]
    if problems:
        text = "; ".join(f"{problem['path']}: {problem['said']}" for problem in problems)
        raise IntegrityError(
            f"{folder} is not signed: {text}", problems=problems, remedy="Put plain files in their place."
        )
    everything = hashing.Config().set_ignored_paths(paths=[], ignore_git_paths=False)
    return _bundle(everything.hash(folder), signer)


def sign_files(files: Mapping[str, str], signer: Signer) -> bytes:
    """The bundle over files whose sha256 (hex, by path) are known: what was hashed when it was published is not read again."""
    from model_signing import manifest
    from model_signing._hashing.hashing import Digest

    rules = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    items = [
        manifest.FileManifestItem(path=PurePosixPath(path), digest=Digest("sha256", bytes.fromhex(sha256)))
        for path, sha256 in files.items()
    ]
    return _bundle(manifest.Manifest("files", items, manifest.SerializationType.from_args(rules)), signer)


def signed_files(bundle: bytes, key: ec.EllipticCurvePublicKey) -> dict[str, str]:
    """The files that the owner of a key signed: sha256 by path, whether or not they are there.

    Raises IntegrityError when this is no bundle, or was not made by this key.
    """
    files = claimed_files(bundle)
    unseal(json.loads(bundle)["dsseEnvelope"], key)
    return files


def claimed_files(bundle: bytes) -> dict[str, str]:
    """Digests that a bundle names, by file; not authenticated. A bundle that lets files go unchecked is refused."""
    try:
        predicate = json.loads(claimed_payload(json.loads(bundle)["dsseEnvelope"]))["predicate"]
        rules, resources = predicate["serialization"], predicate["resources"]
        lax = rules.get("ignore_paths") or rules["allow_symlinks"] or rules["method"] != "files"
        names = {str(entry["name"]): str(entry["digest"]) for entry in resources}
        twice, other = len(names) != len(resources), [e for e in resources if e["algorithm"] != "sha256"]
    except (ValueError, KeyError, TypeError, AttributeError, IntegrityError) as error:
        raise IntegrityError(
            f"the signature is no model-signing bundle: {error!r}", remedy="Sign the model again."
        ) from error
    if lax or twice or other:
        raise IntegrityError(
            f"the signature leaves files unchecked: it was made with {rules}, or names a file twice or by another hash",
            remedy="Sign the model with `headway`, without an ignore list.",
        )
    return names


def _bundle(manifest: Any, signer: Signer) -> bytes:
    """The payload is the library's; the form around it is Sigstore's: https://docs.sigstore.dev/about/bundle/."""
    from google.protobuf import json_format  # type: ignore[import-untyped]
    from model_signing._signing.signing import Payload

    output = json_format.MessageToJson(Payload(manifest).statement.pb).encode()
    hint = hashlib.sha256(pem_of(signer.public_key())).hexdigest()  # as the library names keys
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": seal(output, signer, keyid=""),
    }
    return json.dumps(bundle).encode()


def _link_problem(path: Path) -> str:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if stat.S_ISDIR(status.st_mode):
        return ""
    if not stat.S_ISREG(status.st_mode):
        return "it is no plain file"
    return f"it is a hard link: its bytes have {status.st_nlink} names" if status.st_nlink != 1 else ""
