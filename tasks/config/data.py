"""Settings of validation, preprocessing, and waivers of licences: part of the tree in tasks/config/flows.py.

A field's docstring is its help text, in docs/configuration.md. What the rules mean: docs/data.md.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from tasks.config.base import Fraction, Positive, Settings

CONVERSATIONS = "messages"
"""The `text_field` of conversations: what forms they may have is in tasks/data/corpus/conversations.py."""
Rule = Literal[
    "unreadable",
    "too short",
    "too long",
    "control characters",
    "replacement characters",
    "repeated lines",
    "exact duplicates",
    "near duplicates",
    "contamination",
    "secrets",
    "personal data",
]
"""What one document can break."""
CharacterClass = Literal[
    "letters",
    "digits",
    "space",
    "punctuation",
    "control",
    "latin",
    "greek",
    "cyrillic",
    "arabic_hebrew",
    "indic_thai",
    "cjk",
    "hangul",
    "emoji_other",
    "other",
]
"""How characters are told apart; what belongs to which: tasks/data/corpus/measures.py."""
TOLD: tuple[Rule, ...] = ("secrets", "personal data")
"""Rules that are only told, as shipped: what they find is for a person to judge."""
DROPPED: tuple[Rule, ...] = tuple(rule for rule in get_args(Rule) if rule not in TOLD)


class AdmissionConfig(Settings):
    """Where data may come from. A shard from elsewhere closes the gate; left as it is, everything is admitted."""

    sources: tuple[str, ...] = ("*",)
    """Patterns of the places that a shard may have been published from: `/data/accepted/*`, `https://account/container/*`."""
    paths: tuple[str, ...] = ("*",)
    """Patterns of the paths that a shard may have inside the dataset."""
    signers: tuple[str, ...] = ()
    """Files of public keys (PEM). Every shard must then be signed by one of them; empty: no signature is asked for."""


class ValidationConfig(Settings):
    """Limits that a corpus must keep before anything is spent on it.

    A document that breaks a rule of `quarantine` is set aside; the gate closes only when more than the rule's share breaks it.
    """

    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the document; `messages`: records are conversations."""
    quarantine: tuple[Rule, ...] = DROPPED
    """Rules whose offenders are set aside, with the reason; what is left is a dataset version of its own."""
    only_warn: tuple[Rule, ...] = TOLD
    """Rules that never close the gate: what breaks them is counted and told."""
    min_documents: Positive = 10
    """Fewest documents that make a corpus."""
    min_tokens: int = Field(0, ge=0)
    """Fewest tokens, as estimated from bytes, that make a corpus."""
    bytes_per_token: float = Field(3.0, gt=0)
    """For the estimate of tokens before there is a tokenizer: about 4 for English prose, 2 to 3 for code."""
    max_unreadable_share: Fraction = 0.0
    """Largest share of lines that may be no document: no JSON, not UTF-8, without the text field."""
    min_characters: int = Field(1, ge=0)
    """A document shorter than this is too short."""
    max_characters: Positive = 10_000_000
    """A document longer than this is too long."""
    max_turn_characters: Positive | None = Field(None, exclude_if=lambda most: most is None)
    """A conversation with a longer turn is unreadable; empty: only `max_characters` holds, for all turns together."""
    max_short_share: Fraction = 0.05
    """Largest share of documents that may be too short or empty."""
    max_long_share: Fraction = 0.0
    """Largest share of documents that may be too long."""
    max_control_share: Fraction = 0.01
    """Largest share of control characters in a document (tab, line feed and carriage return are not counted)."""
    max_replacement_share: Fraction = 0.01
    """Largest share of U+FFFD characters in a document: the trace of a wrong encoding."""
    max_bad_documents: Fraction = 0.01
    """Largest share of documents that may break one of the two character limits."""
    max_repeated_line_share: Fraction = 0.9
    """Largest share of a document's characters that may be in repeated lines."""
    max_repetitive_documents: Fraction = 0.05
    """Largest share of documents that may repeat their lines more than that."""
    max_duplicate_share: Fraction = 0.20
    """Largest share of documents that may repeat an earlier one exactly."""
    near_duplicates: bool = True
    """Whether near duplicates are looked for (MinHash): it takes about half as long as all other rules together."""
    near_duplicate_similarity: float = Field(0.8, gt=0.0, lt=1.0)
    """Share of common 5-word shingles (Jaccard) from which two documents are near duplicates."""
    max_near_duplicate_share: Fraction = 0.30
    """Largest share of documents that may nearly repeat an earlier one."""
    index: bool = Field(False, exclude_if=lambda index: not index)
    """Whether accepted documents get an index (an artifact, 290 bytes a document) that later corpora can be compared with."""
    against: tuple[str, ...] = Field((), exclude_if=lambda names: not names)
    """Indices of earlier corpora, as NAME or index/NAME@VERSION: what repeats a document of theirs is a duplicate."""
    benchmarks: tuple[str, ...] = ()
    """Datasets that training must not see, as NAME or dataset/NAME@VERSION: a document that holds one of theirs contaminates."""
    max_contaminated_share: Fraction = 0.001
    """Largest share of documents that may hold a document of a benchmark."""
    max_secret_share: Fraction = 0.0
    """Largest share of documents that may hold a secret: a key, a token, a password in code."""
    max_personal_share: Fraction = 0.0
    """Largest share of documents that may hold personal data: an e-mail address, a card or account number."""
    min_class_share: dict[CharacterClass, Fraction] = Field(default={})
    """Least share of a class of characters in the corpus, by its name: `{latin: 0.5}`. docs/data.md lists the classes."""
    max_class_share: dict[CharacterClass, Fraction] = Field(default={})
    """Largest share of a class of characters in the corpus."""
    max_shard_divergence: Fraction = 0.5
    """Largest distance of one shard to all others together (Jensen-Shannon, base 2, of classes and lengths)."""
    warn_drift: Fraction = 0.1
    """Distance of a column to the version that was accepted before (Jensen-Shannon, base 2) from which it is reported."""
    max_drift: Fraction = 0.5
    """Distance of a column to the version that was accepted before from which the gate closes."""
    min_drift_documents: Positive = 100
    """Fewest documents on either side that a distance is computed from."""
    suite: str = Field("", exclude_if=lambda file: not file)
    """File of a suite of Great Expectations, in JSON, that documents must keep beside these rules: see docs/data.md."""
    admission: AdmissionConfig = AdmissionConfig()
    """Where data may come from."""

    @model_validator(mode="after")
    def _turns_are_of_conversations(self) -> ValidationConfig:
        if self.max_turn_characters and self.text_field != CONVERSATIONS:
            raise ValueError(
                f"max_turn_characters {self.max_turn_characters} is about the turns of conversations: set "
                "text_field: messages, or leave it empty"
            )
        return self

    @model_validator(mode="after")
    def _an_index_has_signatures(self) -> ValidationConfig:
        if self.index and not self.near_duplicates:
            raise ValueError(
                "validation.index needs signatures, which near_duplicates=false leaves out: set near_duplicates=true"
            )
        return self

    @model_validator(mode="after")
    def _what_is_accepted_can_be_read(self) -> ValidationConfig:
        if self.max_unreadable_share and "unreadable" not in self.quarantine:
            raise ValueError(
                f"max_unreadable_share {self.max_unreadable_share} lets lines pass that preprocessing refuses: "
                "name unreadable in quarantine too, or set it to 0"
            )
        return self


class TokenizerConfig(Settings):
    """A byte-level BPE tokenizer that is trained on the corpus, or one that is there."""

    ref: str = ""
    """A tokenizer that was published, as tokenizer/NAME[@VERSION]; empty: one is trained."""
    vocab_size: int = Field(512, ge=257, le=1_000_000)
    """Entries of the trained one, the 256 bytes and the end-of-document token among them."""
    sample_bytes: Positive = 16_000_000
    """Bytes of the corpus that the merges are learned from, taken evenly over all documents."""


class PreprocessingConfig(Settings):
    """From documents to Megatron token files."""

    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the document; `messages`: records are conversations."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    chat_template: str = Field("", exclude_if=lambda template: not template)
    """File of the chat template by which conversations become text, or the template itself; empty: the tokenizer's own."""
    heldout_fraction: float = Field(0.02, gt=0.0, lt=1.0)
    """Share of documents, chosen by the hash of their content, that training never sees."""
    shard_gib: float | None = Field(None, gt=0, exclude_if=lambda size: size is None)
    """Size of a file of the training split at most, in GiB, so that machines write files side by side; empty: one file."""

    @model_validator(mode="after")
    def _templates_are_of_conversations(self) -> PreprocessingConfig:
        if self.chat_template and self.text_field != CONVERSATIONS:
            raise ValueError("chat_template is for conversations: set text_field: messages, or leave it empty")
        return self


class LicenseWaiver(Settings):
    """Somebody's decision about one base model or dataset."""

    of: Annotated[str, Field(pattern=r"^(dataset|checkpoint)/[a-z0-9][a-z0-9._-]*$")]
    """What is waived: dataset/NAME or checkpoint/NAME, all of its versions."""
    who: Annotated[str, Field(min_length=1)]
    """Who decided."""
    why: Annotated[str, Field(min_length=1)]
    """Why: the contract, the purpose, the permission."""
    until: datetime.date
    """Last day on which it counts."""


class LicensesConfig(Settings):
    """What was decided about licences that forbid commercial use or derived works."""

    waivers: tuple[LicenseWaiver, ...] = ()
    """Decisions of people; without one the gate closes before anything is spent."""
