"""A tiny model that is exported by the real program: random weights that vary, and end by themselves."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from waiting import limit

from tasks.common.process import locked
from tasks.storage.manifest import Content, Manifest, Provenance, describe

PROMPTS = ["def ", "import ", "class ", "for i in range(", "return self."]
CONTEXT = 256
VOCABULARY = 300
CORPUS = """
def first(values, default=None):
    for value in values:
        return value
    return default

class Stack:
    def __init__(self, values=()):
        self.values = list(values)

    def pop(self):
        if not self.values:
            raise IndexError("pop from an empty stack")
        return self.values.pop()

import itertools
for i in range(10):
    print(i, first([i]), Stack(range(i)).values)
"""
SEED = 25  # greedy completions of this seed vary, and the first one ends by itself


def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def make_checkpoint(folder, *, heads=4):
    """A random Llama of 2 layers x 64; wide weights and untied embeddings, or greedy decoding only repeats itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": heads}
    config = LlamaConfig(
        **shape,
        vocab_size=VOCABULARY,
        num_key_value_heads=heads // 2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    tokenizer = make_tokenizer()
    assert len(tokenizer) == VOCABULARY
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_gpt2(folder):
    """A random GPT-2; its biases and norms too: as they begin, biases are nothing and would prove nothing."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    network = GPT2LMHeadModel(GPT2Config(**shape, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=0))
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("ln_" in name and name.endswith("weight")), std=0.2)
    network.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def start_export(job, checkpoint, *, hash_seed=None, tokens=None, measured=None, **settings):
    """The real program on a checkpoint; `settings` are ExportConfig's. Without tokens there are no variants."""
    job.mkdir(parents=True)
    export = {"golden_prompts": PROMPTS, "golden_tokens": 24, "variants": [], "speed_seconds": 0.1, **settings}
    inputs = {"checkpoint": str(checkpoint), **({"tokens": str(tokens)} if tokens else {})}
    told = {"export": export, "threads": 1, **({"measured": measured} if measured else {})}
    config = {"program": "tasks.jobs.export", "settings": told, "inputs": inputs}
    (job / "config.json").write_text(json.dumps(config))
    environment = {**os.environ, "HEADWAY_JOB": str(job), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONHASHSEED": hash_seed} if hash_seed else {}
    return subprocess.Popen([sys.executable, "-m", "tasks.jobs.export"], env=environment)


def export_tiny(folder):
    """The folder of an exported model, below `folder`: a copy of the one that the first test of a run makes."""
    made = Path(os.environ["HEADWAY_HOME"]).parent / "tiny"
    with locked(made.with_suffix(".lock")):
        if not made.exists():
            with tempfile.TemporaryDirectory() as making:
                (Path(making) / "checkpoint").mkdir()
                assert (
                    start_export(Path(making) / "job", make_checkpoint(Path(making) / "checkpoint")).wait(limit(180))
                    == 0
                )
                shutil.copytree(Path(making) / "job" / "out", f"{made}.new")
                Path(f"{made}.new").rename(made)
    return Path(shutil.copytree(made, folder / "job" / "out"))


def whole_version(model, folder):
    """A published version, as a folder: its manifest beside its files. Returns its reference."""
    shutil.copytree(model, folder / "files")
    manifest = Manifest(
        content=Content(kind="model", files=describe(folder / "files")), provenance=Provenance(name="tiny")
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return manifest.ref


def files_of(model):
    return [file.model_dump() for file in describe(model)]
