"""Where each shard of a dataset comes from, and whether the policy lets it in. Pure: provenance and signatures in, reasons out.

A signature counts for the exact bytes that it covers, under whatever name they lie. Who closes the gate: tasks/data/judging.py.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import Path

from tasks.common.errors import IntegrityError
from tasks.config.data import AdmissionConfig
from tasks.signing.bundle import claimed_files, signed_files
from tasks.signing.keys import load_public_key


def refused(
    shards: Mapping[str, str],
    sources: Mapping[str, list[str]],
    signatures: Iterable[str],
    config: AdmissionConfig,
) -> dict[str, str]:
    """The shards that may not be there, each with the reason.

    `shards` are sha256 by name, as the manifest says and fetching has checked; `sources` are the places that each was
    published from. Raises Missing when a signer's key is not there, ValueError when it is no key.
    """
    signed = authorised(signatures, [Path(signer) for signer in config.signers])
    result: dict[str, str] = {}
    for name, sha256 in shards.items():
        if not _fits(name, config.paths):
            result[name] = f"no path of {', '.join(config.paths)}"
        elif strange := _strange(sources.get(name, []), config.sources):
            result[name] = strange
        elif config.signers and sha256 not in signed:
            result[name] = f"signed by none of {', '.join(config.signers)}"
    return result


def authorised(signatures: Iterable[str], keys: Iterable[Path]) -> set[str]:
    """sha256 of all files that an owner of one of the keys signed."""
    results: set[str] = set()
    bundles = [bundle.encode() for bundle in signatures]
    for key in map(load_public_key, keys):
        for bundle in bundles:
            try:
                results |= set(signed_files(bundle, key).values())
            except IntegrityError:
                continue  # by another signer, or forged: it lets nothing in
    return results


def covers(signature: str, digests: set[str]) -> bool:
    """Whether a signature speaks of one of these files; whose it is, is not asked."""
    return not digests.isdisjoint(claimed_files(signature.encode()).values())


def _strange(sources: list[str], allowed: tuple[str, ...]) -> str:
    if not sources:
        return "" if "*" in allowed else "from an unknown place"
    strange = [source for source in sources if not _fits(source, allowed)]
    return f"from {strange[0]}" if strange else ""


def _fits(text: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)
