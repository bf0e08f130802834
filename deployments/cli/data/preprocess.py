"""`headway preprocess` and `tokens`: plain files to Megatron datasets at full speed, and a look at any of them.

The work is done by tasks/tokenizing. See docs/preprocessing.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import CommandError, say
from tasks.data.tokenizing.splits import parse_splits

SHOWN_TOKENS = 200
BAR = 40


def preprocess(
    input_: Annotated[
        list[str],
        typer.Option("--input", help="A file, folder or glob: JSONL, .gz, .zst, Parquet, text; may be repeated."),
    ],
    tokenizer_model: Annotated[Path, typer.Option(help="Folder of a Hugging Face tokenizer.")],
    output_prefix: Annotated[Path, typer.Option(help="The beginning of the output's file names.")],
    json_keys: Annotated[
        list[str] | None, typer.Option(help="The field that contains the text; may be repeated.  [text]")
    ] = None,
    append_eod: Annotated[
        bool, typer.Option("--append-eod", help="End every document with the end-of-document token.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Number of processes; 0: one per core.")] = 0,
    split: Annotated[
        str, typer.Option(help="Shares by content hash: 0.98,0.02 (train, heldout) or train,valid,test.")
    ] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace output that other input or settings made.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn text into Megatron .bin/.idx, byte for byte what its preprocess_data.py writes.

    After a kill, the same command continues where it stopped. Output that is already complete is left as it is.
    """
    from tasks.data.tokenizing.run import plan
    from tasks.data.tokenizing.run import preprocess as run
    from tasks.data.tokenizing.tokenizer import open_tokenizer
    from tasks.data.tokenizing.units import Work

    work = Work(open_tokenizer(tokenizer_model), tuple(json_keys or ["text"]), parse_splits(split), append_eod)
    wanted = plan(input_, work, prefix=output_prefix)
    try:
        with _Drawn(wanted.bytes) as drawn:
            done = run(wanted, workers=workers or cores(), overwrite=overwrite, report=drawn.told)
    except KeyboardInterrupt as error:  # typer would end without a word
        raise CommandError(error, {"parts": str(wanted.parts)}) from None
    fields: dict[str, Any] = {
        "outputs": list(done.outputs),
        "arguments": list(done.arguments),
        "vocab_size": work.tokenizer.vocab_size,
        "eod_id": work.tokenizer.eod,
        "bytes_read": done.bytes_read,
        "seconds": done.seconds,
        "engine": done.engine,
        "engine_reason": done.reason,
        "units": done.units,
        "resumed_units": done.resumed,
    }
    lines = [
        f"{output['bin']}  {output['documents']} documents, {output['tokens']} tokens ({output['dtype']})"
        for output in fields["outputs"]
    ]
    if fields["bytes_read"]:
        rate = fields["bytes_read"] / 1e6 / max(fields["seconds"], 1e-3)
        lines.append(f"{fields['bytes_read'] / 1e6:.1f} MB in {fields['seconds']:.1f} s, {rate:.0f} MB/s")
    else:
        lines.append("All of it was there already, of the same input and settings.")
    if fields["engine_reason"]:
        lines.append(f"Encoded by tokenizers, which is slow: {fields['engine_reason']}.")
    if fields["bytes_read"] and fields["resumed_units"]:
        lines.append(f"{fields['resumed_units']} of {fields['units']} units were there from an earlier run.")
    say(fields, "\n".join([*lines, "For Megatron: " + " ".join(fields["arguments"])]), as_json=as_json)


def tokens(
    prefix: Annotated[
        Path, typer.Argument(help="The prefix of PREFIX.bin and PREFIX.idx, which Megatron may have written.")
    ],
    tokenizer_model: Annotated[
        str,
        typer.Option(
            help="Folder of the tokenizer, to decode a sample; by default the folder `tokenizer` next to them."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check a Megatron .bin/.idx and show its content."""
    from tasks.data.tokenizing.checking import look
    from tasks.data.tokenizing.engine import Tokenizers
    from tasks.data.tokenizing.tokenizer import open_tokenizer

    path = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
    if not Path(f"{path}.idx").is_file():
        raise ValueError(f"{path}.idx does not exist; name the prefix of a dataset, without .bin or .idx")
    prefix = path
    beside = prefix.parent / "tokenizer"
    folder = tokenizer_model or (str(beside) if beside.is_dir() else "")
    tokenizer = open_tokenizer(folder) if folder else None
    held = look(prefix, largest=tokenizer.vocab_size if tokenizer else None)
    sample = None  # the beginning of the first sequence as text
    if tokenizer:
        first = next((each for each in held.samples if each), ())
        sample = Tokenizers(tokenizer).decode(list(first[:SHOWN_TOKENS]))
    fields: dict[str, Any] = {
        "prefix": str(prefix),
        "documents": held.documents,
        "sequences": held.sequences,
        "tokens": held.tokens,
        "dtype": held.dtype,
        "lengths": {"min": held.shortest, "median": held.median, "max": held.longest},
        "last_tokens": [{"token": token, "sequences": count} for token, count in held.ends],
        "sample": sample,
    }
    lengths, most = fields["lengths"], max(held.histogram, default=0)
    used = [index for index, count in enumerate(held.histogram) if count]
    bars = [
        f"  {(1 << index) >> 1:>10} and more  {count:>10}  {'━' * round(BAR * count / most)}"
        for index, count in enumerate(held.histogram)
        if used and used[0] <= index <= used[-1]
    ]
    lines = [
        f"{fields['prefix']}: sound",
        f"{fields['documents']} documents, {fields['sequences']} sequences, {fields['tokens']} tokens ({fields['dtype']})",
        f"tokens a sequence: {lengths['min']} to {lengths['max']}, median {lengths['median']}",
        *bars,
        "last tokens: " + ", ".join(f"{e['token']} ({e['sequences']} sequences)" for e in fields["last_tokens"]),
    ]
    say(fields, "\n".join([*lines, *(["", fields["sample"]] if fields["sample"] else [])]), as_json=as_json)


def mixture(
    parts: Annotated[list[str], typer.Argument(help="WEIGHT PREFIX WEIGHT PREFIX ...")],
    as_json: Json = False,
) -> None:
    """Check datasets and their weights, and print Megatron's arguments for the mixture."""
    from tasks.data.tokenizing.mixture import data_arguments, parse_mixture

    arguments = data_arguments(parse_mixture(parts))
    say({"arguments": list(arguments)}, " ".join(arguments), as_json=as_json)


class _Drawn:
    """Progress of bytes, drawn from the first word on: before it, processes are forked, and drawing has a thread."""

    def __init__(self, total: int) -> None:
        from deployments.cli.progress import Progress, console

        self._progress = Progress(console())
        self._total = total
        self._read = 0

    def __enter__(self) -> _Drawn:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.quiet()

    def told(self, read: int) -> None:
        if not self._read:
            self._progress.started("preprocess", None)
        self._read += max(read, 1)
        text = f"{self._read / 1e6:.0f} of {self._total / 1e6:.0f} MB"
        self._progress.progress("preprocess", self._read, self._total, text, None)


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
