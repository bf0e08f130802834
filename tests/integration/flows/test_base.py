"""A model of others as a version: what is taken of it and what is refused; whose tokenizer a run uses; what the plan reckons."""

import json
import shutil
from pathlib import Path

import pytest
from base_material import ROWS, make_base
from support import Home
from tiny_model import make_gpt2

from deployments.publishing.base_models import make_base as publish_base
from flows.support.inputs import base_of, tokenizer_of_base, tokenizer_of_tuned
from flows.support.planned_jobs import planned_job
from tasks.artifacts import Checkpoint, unqualified
from tasks.common.errors import IntegrityError, Unknown
from tasks.config.flows import RetrainConfig
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, LoraConfig, TrainingConfig
from tasks.formats.model_folder import open_model_folder, shape_of
from tasks.plan import reckon
from tasks.planning.case import Network
from tasks.planning.counts import adapter_parameters
from tasks.security.signatures import require_signed
from tasks.storage import open_store
from tasks.storage.store import find

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "tiny", shards=True)


@pytest.fixture(scope="module")
def published(base, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return home, publish_base(open_store(home), home, "tiny", base)


def config(**training):
    return RetrainConfig.model_validate(
        {"dataset": "d", "training": {"model": "m", "base": "checkpoint/tiny", **training}}
    )


def test_weights_settings_tokenizer_and_license_are_taken_and_no_code(published, base):
    home, made = published
    paths = {file.path for file in made.checkpoint.content.files}
    shards = {path.name for path in base.glob("*.safetensors")}
    assert len(shards) > 1 and shards <= paths
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json", "README.md"} <= paths
    assert not [path for path in paths if path.endswith(".py")]
    assert made.checkpoint.provenance.inputs == (made.tokenizer.ref,)
    assert (made.architecture, made.parameters) == ("LlamaForCausalLM", open_model_folder(base).parameters)
    assert require_signed(open_store(home), home, made.checkpoint).key == made.key
    again = publish_base(open_store(home), home, "tiny", base)
    assert (again.checkpoint.version, again.tokenizer.version) == (made.checkpoint.version, made.tokenizer.version)


def test_a_run_encodes_with_the_tokenizer_of_its_base(published):
    home, made = published
    store = open_store(home)
    found = base_of(store, config())
    assert found.ref == made.checkpoint.ref and tokenizer_of_base(store, config()).ref == made.tokenizer.ref
    assert base_of(store, config(base="")) is None and tokenizer_of_base(store, config(base="")) is None
    with pytest.raises(Unknown, match="checkpoint/none"):
        base_of(store, config(base="checkpoint/none"))


def test_a_context_beyond_the_learnt_positions_of_a_base_is_refused_before_anything_runs(published, tmp_path):
    home, _ = published
    store = open_store(home)
    (tmp_path / "gpt2").mkdir()
    publish_base(store, home, "gpt2", make_gpt2(tmp_path / "gpt2"))
    longer = {"export": {"context_length": 257}}
    for base in ("checkpoint/tiny", "checkpoint/gpt2"):
        wanted = RetrainConfig.model_validate({**config(base=base).model_dump(), **longer})
        if base == "checkpoint/tiny":
            assert base_of(store, wanted), "rotary positions can be lengthened"
        else:
            with pytest.raises(ValueError, match="export.context_length is 257, .* positions for 256 tokens"):
                base_of(store, wanted)


def test_another_tokenizer_than_the_bases_is_refused(published, base, tmp_path):
    home, _ = published
    store = open_store(home)
    other = shutil.copytree(base, tmp_path / "other")
    rules = json.loads((other / "tokenizer.json").read_text())
    rules["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(rules))
    ref = publish_base(store, home, "other", other).tokenizer.ref
    with_other = RetrainConfig.model_validate(
        {**config().model_dump(), "preprocessing": {"tokenizer": {"ref": ref}}, "validation": {}}
    )
    with pytest.raises(ValueError, match="leave it empty"):
        tokenizer_of_base(store, with_other)


def test_the_planned_jobs_are_handed_base_and_tokenizer(published, monkeypatch, tmp_path):
    home, made = published
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    planned = planned_job("train", "nothing-yet", config())
    assert planned.job.artifacts["base"] == made.checkpoint.ref == planned.job.settings["made_from"]["base"]
    assert planned_job("preprocess", "nothing-yet", config()).job.artifacts["tokenizer"] == made.tokenizer.ref
    none = planned_job("train", "nothing-yet", config(base=""))
    assert set(none.job.inputs) == {"tokens"}
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    assert "checkpoint/tiny: it is not published" in planned_job("train", "nothing-yet", config()).pending


def test_the_plan_reckons_with_the_bases_size_and_with_what_is_trained_of_it(base):
    found = open_model_folder(base)
    training = TrainingConfig(base="checkpoint/tiny", network=shape_of(found.config), sequence_length=64)
    on = unqualified(RetrainConfig().cluster).model_copy(
        update={"matmul_gflops_per_rank": 1.0, "allreduce_gigabytes_per_second": 1.0}
    )
    full = reckon(
        training, PlanningConfig(), ExecutionConfig(), on, vocab_size=found.vocab_size, train_tokens=1000, home=base
    )
    assert full.parameters == found.parameters and found.vocab_size == ROWS
    tuned = training.model_copy(update={"lora": LoraConfig(rank=2)})
    lora = reckon(
        tuned, PlanningConfig(), ExecutionConfig(), on, vocab_size=found.vocab_size, train_tokens=1000, home=base
    )
    adapters = adapter_parameters(Network.of_config(training.network, ROWS), 2)
    assert full.memory_per_rank - lora.memory_per_rank == 16 * full.parameters - 16 * adapters - 4 * full.parameters
    assert lora.checkpoint < full.checkpoint


def test_adapters_are_as_many_as_peft_makes(base):
    from tasks.jobs.training.network import build_network
    from tasks.jobs.training.starting import add_adapters

    gpt2 = {"architecture": "gpt2", "layers": 1, "hidden_size": 16, "heads": 2, "kv_heads": 2, "intermediate_size": 32}
    for network in ({}, gpt2):
        for targets in ((), ("c_attn", "c_proj") if network else ("k_proj", "down_proj")):
            said = {"base": "checkpoint/tiny", "lora": {"rank": 3, "targets": targets}, "network": network}
            made = TrainingConfig.model_validate(said)
            tuned = add_adapters(build_network(made, vocab_size=64, eod=63), made)
            counted = sum(each.numel() for each in tuned.parameters() if each.requires_grad)
            assert counted == adapter_parameters(Network.of_config(made.network, 1), 3, targets), (network, targets)


def cut(folder):
    shard = next(folder.glob("model-0*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])


def change(name, **said):
    def spoil(folder):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **said}))

    return spoil


def pickled(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


@pytest.mark.parametrize(
    "spoil, words",
    [
        (cut, "cut off"),
        (pickled, "pickle"),
        (lambda folder: next(folder.glob("model-0*")).unlink(), "not beside it"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (change("config.json", architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
        (change("config.json", auto_map={"AutoModelForCausalLM": "modeling_tiny.Tiny"}), "no code of a model is run"),
        (change("config.json", quantization_config={"quant_method": "gptq"}), "quantised"),
        (change("config.json", vocab_size=ROWS - 5), "do not belong together"),
        (change("model.safetensors.index.json", weight_map={"a": "../../etc/passwd"}), "not beside it"),
        (change("tokenizer_config.json", eos_token=None), "end-of-document"),
    ],
)
def test_what_training_could_not_start_from_is_refused(base, tmp_path, spoil, words):
    folder = shutil.copytree(base, tmp_path / "base")
    spoil(folder)
    home = tmp_path / "home"
    with pytest.raises(ValueError, match=words):
        publish_base(open_store(home), home, "tiny", folder)
    assert list(open_store(home).manifests("checkpoint")) == []


def test_what_is_neither_a_folder_nor_gguf_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match="name a Hugging Face folder or a .gguf file"):
        publish_base(open_store(tmp_path), tmp_path, "tiny", base / "config.json")


def test_what_was_fine_tuned_is_measured_with_the_tokenizer_of_its_base(published, tmp_path):
    from made_versions import make

    home, made = published
    store = open_store(home)
    tuned = make(store, tmp_path / "tuned", "checkpoint/tuned", {"config.json": "{}"}, inputs=(made.checkpoint,))
    alone = make(store, tmp_path / "alone", "checkpoint/alone", {"config.json": "[]"})
    found = [
        tokenizer_of_tuned(store, Checkpoint(name=each.provenance.name, version=each.version, uri=""))
        for each in (tuned, alone)
    ]
    assert found[0].ref == made.tokenizer.ref and found[1] is None


def test_a_checkpoint_of_an_unknown_tokenizer_is_no_base(published, tmp_path):
    from made_versions import make

    home, _ = published
    store = open_store(home)
    make(store, tmp_path, "checkpoint/bare", {"config.json": "{}"})
    with pytest.raises(IntegrityError, match="no tokenizer is known"):
        tokenizer_of_base(store, config(base="checkpoint/bare"))
    assert find(store, "checkpoint", "bare", "").version


def test_the_command_names_what_it_published(base, tmp_path):
    said = Home(tmp_path / "home").ok("checkpoint", "publish", "tiny", base).said
    assert said["architecture"] == "LlamaForCausalLM" and said["ref"].startswith("checkpoint/tiny@")
    assert said["tokenizer"].startswith("tokenizer/tiny@") and "config.json" in said["files"]
