"""Writes golden.json: what Megatron's own preprocess_data.py makes of the three tokenizers and the awkward documents.

    python tests/integration/tasks/data/tokenizing/make_golden.py MEGATRON [PYTHON]

MEGATRON is a checkout of NVIDIA/Megatron-LM, PYTHON one that can run it (it needs torch, triton and Python 3.12).
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[3] / "support"))

from token_material import KINDS, make_tokenizer, write_documents  # noqa: E402


def run_megatron(megatron: Path, source: Path, tokenizer: Path, *, prefix: Path, python: str = sys.executable) -> None:
    """Megatron's script as people start it."""
    script = str(megatron / "tools" / "preprocess_data.py")
    given = ["--input", str(source), "--output-prefix", str(prefix), "--tokenizer-model", str(tokenizer)]
    subprocess.run(
        [python, script, *given, "--tokenizer-type", "HuggingFaceTokenizer", "--append-eod", "--workers", "2"],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(megatron), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.DEVNULL,
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(megatron: Path, python: str) -> None:
    golden = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_documents(folder / "awkward.jsonl")
        for kind in KINDS:
            tokenizer = make_tokenizer(kind, folder / kind)
            run_megatron(megatron, source, tokenizer, prefix=folder / f"{kind}-out", python=python)
            golden[kind] = {
                "input": digest(source),
                "tokenizer": digest(tokenizer / "tokenizer.json"),
                **{end: digest(folder / f"{kind}-out_text_document.{end}") for end in ("bin", "idx")},
            }
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else sys.executable)
