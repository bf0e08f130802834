"""Training that starts from a model of others: continued, fine-tuned, with adapters; what it refuses, and what it writes."""

import json
import shutil

import pytest
import torch
from base_material import ROWS, make_base, write_tokens_of
from safetensors.torch import load_file
from training_runs import Forks, content, error, numbers, said_by

from tasks.config.training import LoraConfig, TrainingConfig
from tasks.formats.model_folder import declared_context
from tasks.jobs.checkpoint.files import manifests

FULL = TrainingConfig(
    model="tuned",
    base="checkpoint/tiny",
    sequence_length=32,
    global_batch_size=4,
    micro_batch_size=2,
    steps=8,
    warmup_steps=1,
    learning_rate=2e-3,
)
LORA = FULL.model_copy(update={"lora": LoraConfig(rank=2, alpha=4.0, dropout=0.1), "learning_rate": 2e-2})
REFS = {"tokens": "tokens/t@" + "1" * 64, "base": "checkpoint/tiny@" + "2" * 64}


@pytest.fixture(scope="module")
def launch():
    forks = Forks("import peft")
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def tokens(base, tmp_path_factory):
    return write_tokens_of(base, tmp_path_factory.mktemp("tokens") / "t")


def write(job, tokens, base, config, *, every=4, **more):
    job.mkdir()
    settings = {"training": config.model_dump(mode="json"), "checkpoint_every_steps": every, "keep_checkpoints": 2}
    inputs = {"tokens": str(tokens), "base": str(base)}
    spec = {"program": "tasks.jobs.train", "settings": {**settings, "made_from": REFS, **more}, "inputs": inputs}
    (job / "config.json").write_text(json.dumps(spec))
    return job


def losses(job):
    return [values[0] for _, values in sorted(numbers(job).items())]


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(network):
    with torch.no_grad():
        return network(input_ids=torch.arange(20)[None]).logits


@pytest.fixture(scope="module")
def full(launch, tokens, base, tmp_path_factory):
    job = write(tmp_path_factory.mktemp("jobs") / "full", tokens, base, FULL)
    assert launch(job, ranks=1) == [0], said_by(job)
    return job


@pytest.fixture(scope="module")
def lora(launch, tokens, base, tmp_path_factory):
    job = write(tmp_path_factory.mktemp("jobs") / "lora", tokens, base, LORA)
    assert launch(job, ranks=2) == [0, 0], said_by(job)
    return job


def test_training_goes_on_where_the_base_stopped(full, base, tokens):
    """The first loss is the base's own on the same samples, and all weights move, those of the padding token too."""
    from tasks.jobs.data.samples import open_samples

    samples = torch.from_numpy(open_samples(tokens, FULL).batch(0, FULL.global_batch_size))
    with torch.no_grad():
        said = loaded(base)(input_ids=samples[:, :-1]).logits
    expected = float(torch.nn.functional.cross_entropy(said.flatten(0, 1), samples[:, 1:].flatten()))
    assert losses(full)[0] == pytest.approx(expected, abs=1e-4)
    assert losses(full)[-1] < losses(full)[0] - 0.5
    before, after = load_file(base / "model.safetensors"), load_file(full / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name].float(), after[name]) for name in before)
    moved = before["model.embed_tokens.weight"][0].float() - after["model.embed_tokens.weight"][0]
    assert moved.abs().max() > 2e-3, "that is weight decay alone: the row of the padding token was not trained"


def test_what_was_made_of_a_base_loads_as_the_base_does(full, base):
    from transformers import AutoTokenizer

    ours, theirs = loaded(full / "out"), loaded(base)
    assert ours.config.architectures == theirs.config.architectures and ours.config.vocab_size == ROWS
    assert (
        AutoTokenizer.from_pretrained(full / "out")("def x").input_ids
        == AutoTokenizer.from_pretrained(base)("def x").input_ids
    )
    assert not (full / "out" / "modeling_tiny.py").exists()
    assert declared_context(base) == declared_context(full / "out") == 256 > FULL.sequence_length, (
        "the base's own context"
    )


def test_the_card_says_what_it_was_made_of_and_keeps_the_license(lora, full):
    card = (full / "out" / "README.md").read_text()
    matter = card.split("---")[1]
    assert "license: apache-2.0" in matter and f"base_model: {REFS['base']}" in matter and "lora" not in matter
    assert REFS["tokens"] in card and "# tuned" in card
    assert "- lora" in (lora / "out" / "README.md").read_text().split("---")[1]


def test_adapters_alone_are_trained_and_saved(lora, base):
    """A checkpoint holds the adapters and not the base; merged, the weights differ from the base's by rank 2 where one was."""
    newest = max(manifests(lora / "checkpoints"))
    shards = [load_file(path) for path in newest.parent.rglob("*.safetensors")]
    names = {name for shard in shards for name in shard if name.startswith(("weight.", "optimizer."))}
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    before, after = load_file(base / "model.safetensors"), load_file(lora / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name])}
    assert changed and all("_proj" in name for name in changed) and len(changed) == 14
    assert all(torch.linalg.matrix_rank(after[name] - before[name].float(), rtol=1e-3) <= 2 for name in changed)
    assert losses(lora)[-1] < losses(lora)[0]


def test_the_adapter_by_itself_beside_the_base_says_the_same(lora, base):
    from peft import PeftModel

    beside = PeftModel.from_pretrained(loaded(base), lora / "out" / "adapter").eval()
    assert torch.allclose(logits(beside), logits(loaded(lora / "out")), atol=1e-4)
    assert not torch.allclose(logits(loaded(base)), logits(loaded(lora / "out")), atol=1e-2)


def test_adapters_go_on_after_a_kill_as_if_there_had_been_none(launch, lora, tokens, base, tmp_path):
    """Dropout included: the generators are saved too."""
    job = write(tmp_path / "killed", tokens, base, LORA)
    dies = """
import os, pathlib, signal, time, tasks.jobs.training.torch_engine as engine
saved = pathlib.Path(os.environ["HEADWAY_JOB"], "checkpoints")
plain, done = engine.TorchEngine.update, []
def update(self, rate):
    done.append(plain(self, rate))
    while len(done) == 7:
        if any(saved.glob("step-00000004/*/manifest.json")): os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
engine.TorchEngine.update = update
"""
    assert all(launch(job, ranks=2, fault=dies))
    assert launch(job, ranks=2, attempt=2) == [0, 0], said_by(job)
    assert json.loads((job / "result.json").read_text())["resumed_from_step"] == 4
    assert content(job / "out") == content(lora / "out")


def test_divided_weights_give_the_same_adapters(launch, lora, tokens, base, tmp_path):
    job = write(tmp_path / "divided", tokens, base, LORA, execution={"parallel": "fsdp"})
    assert launch(job, ranks=2) == [0, 0], said_by(job)
    assert losses(job) == pytest.approx(losses(lora), abs=1e-4)
    ours, theirs = (load_file(each / "out" / "adapter" / "adapter_model.safetensors") for each in (job, lora))
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


def test_adapters_of_another_base_are_no_good(launch, lora, tmp_path):
    job = shutil.copytree(lora, tmp_path / "other", ignore=shutil.ignore_patterns("out", "result.json", "errors"))
    spec = json.loads((job / "config.json").read_text())
    spec["settings"]["made_from"]["base"] = "checkpoint/tiny@" + "3" * 64
    (job / "config.json").write_text(json.dumps(spec))
    assert launch(job, ranks=2, attempt=2) == [1, 1]
    assert error(job)["class"] == "user" and "base is 'checkpoint/tiny@2" in error(job)["message"]


def test_gpt2s_matrices_lie_on_their_side_and_are_merged_so(tmp_path):
    from tasks.jobs.training.network import build_network
    from tasks.jobs.training.starting import add_adapters, write_network

    small = {"architecture": "gpt2", "layers": 1, "hidden_size": 16, "heads": 2, "kv_heads": 2, "intermediate_size": 32}
    config = TrainingConfig.model_validate({**LORA.model_dump(), "network": small})
    network = add_adapters(build_network(config, vocab_size=64, eod=63), config).eval()
    for name, parameter in network.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    (tmp_path / "tokenizer").mkdir()
    write_network(network, config, tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert torch.allclose(logits(network), logits(loaded(tmp_path / "out")), atol=1e-5)


def test_a_gguf_files_text_is_cut_as_the_file_says_or_the_file_is_refused(tmp_path):
    from tokenizers.pre_tokenizers import Sequence

    from tasks.jobs.gguf_folder import BEFORE, write_tokenizer

    cut = {name: [word for word, _ in Sequence(parts).pre_tokenize_str("x1234 a")] for name, parts in BEFORE.items()}
    assert cut == {"gpt-2": ["x", "1234", "Ġa"], "smollm": ["x", "1", "2", "3", "4", "Ġa"]}
    for kind, before in (("gpt2", "llama-bpe"), ("llama", "default")):
        told = {"tokenizer.ggml.model": kind, "tokenizer.ggml.pre": before}
        with pytest.raises(ValueError, match=f"{before}.*Hugging Face folder instead"):
            write_tokenizer(tmp_path / "model.gguf", tmp_path, told)


@pytest.mark.parametrize(
    "config, spoil, words",
    [
        (FULL, "eod", ("end with token 5", "0", "tokenizer.ref")),
        (FULL, "words", ("'a' is", "tokenizer.ref")),
        (FULL, "size", ("900 words", str(ROWS))),
        (FULL.model_copy(update={"sequence_length": 300}), "", ("sequence_length 300", "256 positions")),
        (LORA.model_copy(update={"lora": LoraConfig(rank=2, targets=("query",))}), "", ("query", "q_proj")),
    ],
)
def test_what_does_not_fit_the_base_is_refused(launch, tokens, base, tmp_path, config, spoil, words):
    theirs = shutil.copytree(tokens, tmp_path / "tokens")
    about, rules = theirs / "tokens.json", theirs / "tokenizer" / "tokenizer.json"
    if spoil == "size":
        about.write_text(json.dumps({**json.loads(about.read_text()), "vocab_size": 900}))
    elif spoil == "eod":
        settings = theirs / "tokenizer" / "tokenizer_config.json"
        word = next(word for word, number in json.loads(rules.read_text())["model"]["vocab"].items() if number == 5)
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token": word}))
    elif spoil:
        rules.write_text(_renumbered(rules.read_text()))
    job = write(tmp_path / "job", theirs, base, config)
    assert launch(job, ranks=1) == [1]
    said = error(job)
    assert said["class"] == "user" and all(word in said["message"] for word in words), said


def _renumbered(rules):
    """The same words, two of them with each other's numbers."""
    said = json.loads(rules)
    words = said["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    return json.dumps(said)
