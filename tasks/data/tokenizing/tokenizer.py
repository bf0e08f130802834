"""Opening a Hugging Face tokenizer as Megatron's HuggingFaceTokenizer sees it: its size, its end of document, its rules.

Encoding is tasks/data/tokenizing/engine.py. transformers takes longer to import than 33 MB take to encode, so it is asked only
where it would not read tokenizer.json as it stands.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tasks.formats.mmididx import token_dtype

AS_IT_STANDS = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that transformers 5 builds of tokenizer.json and nothing else."""
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PROBE = "a"


@dataclass(frozen=True)
class OpenedTokenizer:
    """A tokenizer as one text, with what Megatron asks of it."""

    path: Path
    rules: str
    """The content of a tokenizer.json."""
    vocab_size: int
    """Entries with the added tokens, as `len(AutoTokenizer)` counts."""
    eod: int | None
    """The end-of-document token; None when the tokenizer names none."""
    prefix: tuple[int, ...]
    """Tokens that stand before every document: the beginning of a sequence, with many tokenizers."""
    suffix: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[np.number]:
        return np.dtype(token_dtype(self.vocab_size))

    @cached_property
    def digest(self) -> str:
        """Changes with everything that changes a document's tokens."""
        return hashlib.sha256(json.dumps([self.rules, self.eod]).encode()).hexdigest()

    def require_eod(self) -> int:
        """The end-of-document token. Raises ValueError when there is none."""
        if self.eod is None:
            raise ValueError(
                f"{self.path} has no end-of-document token: name one of its tokens as eos_token in tokenizer_config.json, "
                "or leave --append-eod out"
            )
        return self.eod


def open_tokenizer(path: str | Path) -> OpenedTokenizer:
    """Open a tokenizer's folder, or a tokenizer.json, which takes the settings that lie beside it.

    Raises ValueError when there is no tokenizer, or when its ids do not fit the type that Megatron gives them;
    ModuleNotFoundError when only transformers can read it and is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; name the folder of a Hugging Face tokenizer")
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    settings = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    if file.is_file() and (path.is_file() or _reads_as_it_stands(folder, file, settings)):
        rules = file.read_text(encoding="utf-8")
        eod_token = _content(settings.get("eos_token")) or _content(settings.get("sep_token"))
        return _opened(path, rules, eod_token)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        output = str(error).splitlines()[0]
        raise ValueError(
            f"{folder} holds no tokenizer that transformers can read ({output.strip(' :')}); it needs a tokenizer.json and a "
            "tokenizer_config.json, as save_pretrained writes them"
        ) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"{folder} is read by Python code only; save it as tokenizer.json with save_pretrained first")
    return _opened(folder, tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token or tokenizer.sep_token)


@lru_cache(maxsize=2)
def load(rules: str) -> Any:
    """The `tokenizers.Tokenizer` of rules, without truncation and padding. Raises ValueError when they are none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(rules)
    except Exception as error:
        raise ValueError(f"no tokenizer.json: {error}; give the folder of a Hugging Face tokenizer") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _opened(path: Path, rules: str, eod_token: str | None) -> OpenedTokenizer:
    try:
        tokenizer = load(rules)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    size = int(tokenizer.get_vocab_size(with_added_tokens=True))
    eod = tokenizer.token_to_id(eod_token) if eod_token else None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    most = int(np.iinfo(np.dtype(token_dtype(size)).name).max)
    if largest > most:
        raise ValueError(
            f"{path} has {size} entries, so Megatron stores {np.dtype(token_dtype(size)).name}, but one has the number "
            f"{largest}: number the entries without gaps"
        )
    prefix, suffix = around(tokenizer)
    return OpenedTokenizer(path, rules, size, eod, prefix, suffix)


def around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a document, as ids. Raises ValueError where it changes the document's own."""
    bare = tokenizer.encode(PROBE, add_special_tokens=False).ids
    full = tokenizer.encode(PROBE).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise ValueError("its post-processor changes the document's own tokens; use one that puts tokens around it")


def _reads_as_it_stands(folder: Path, file: Path, settings: dict[str, Any]) -> bool:
    """Whether AutoTokenizer would take tokenizer.json as it is, with nothing added, rebuilt or patched."""
    if (folder / "config.json").exists() or "auto_map" in settings:
        return False
    if any(settings.get(name) for name in ("add_bos_token", "add_eos_token", "split_special_tokens")):
        return False
    rules = _json(file)
    kind = settings.get("tokenizer_class")
    if kind not in AS_IT_STANDS and not (
        str(kind).removesuffix("Fast") == "GPT2Tokenizer" and _is_gpt2(rules, settings)
    ):
        return False
    added = {token["content"]: token for token in rules.get("added_tokens", ())}
    named = [_content(settings.get(name)) for name in NAMED]
    extra = [
        _content(t) for name in ("additional_special_tokens", "extra_special_tokens") for t in settings.get(name) or ()
    ]
    decoder = settings.get("added_tokens_decoder") or {}
    plain = rules.get("normalizer") is None
    return all(_is_special(added.get(token), plain=plain) for token in (*named, *extra) if token) and all(
        added.get(token["content"], {}).get("id") == int(number) for number, token in decoder.items()
    )


def _is_gpt2(rules: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether the rules are those that the class GPT2Tokenizer builds itself of vocabulary and merges."""
    before = rules.get("pre_tokenizer") or {}
    model = rules.get("model") or {}
    return (
        rules.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and bool(before.get("add_prefix_space")) == bool(settings.get("add_prefix_space", False))
        and model.get("type") == "BPE"
        and not any(model.get(name) for name in ("dropout", "byte_fallback", "ignore_merges", "fuse_unk"))
        and all(settings.get(name) for name in ("bos_token", "eos_token", "unk_token"))
    )


def _is_special(token: dict[str, Any] | None, *, plain: bool) -> bool:
    """Whether a named token is in the rules already, as transformers would add it."""
    if token is None or not token.get("special"):
        return False
    return not any(token.get(name) for name in ("lstrip", "rstrip", "single_word")) and (
        plain or not token["normalized"]
    )


def _content(token: Any) -> str | None:
    """A special token as its text: settings name it so, or as an object with its attributes."""
    result = token.get("content") if isinstance(token, dict) else token
    return result if isinstance(result, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; give a sound tokenizer") from error
    return value if isinstance(value, dict) else {}
