"""Datasets and models of the Hugging Face hub as versions, and versions on the hub: by huggingface_hub, against its HTTP edge."""

import hashlib
import json
import re
from dataclasses import replace
from functools import cache

import fake_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import close_session, constants
from safetensors.numpy import save
from support import Home
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deployments.publishing import base_models, datasets
from deployments.publishing.hub_files import data_files
from deployments.publishing.hugging_face import Hub
from deployments.publishing.pushing import card_for_hub, push
from tasks.common.errors import Conflict, IntegrityError, Missing, Unknown
from tasks.registry.versions import publish_for_signing
from tasks.security.audit import entries
from tasks.security.signatures import require_signed, sign
from tasks.signing.keys import ensure_key
from tasks.storage import open_store
from tasks.storage.manifest import Content, Manifest, Provenance

READER, WRITER = "hf_" + "canaryReader" * 3, "hf_" + "canaryWriter" * 3
CARD = b"---\nlicense: apache-2.0\n---\n\n# A repository\n"
SPLITS = b"""---
license: cc-by-4.0
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
---
"""


@pytest.fixture
def hub(monkeypatch):
    """A hub with a reader and a writer; nobody's token is in the environment."""
    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    close_session()
    with fake_hub.running() as running:
        running.tokens = {
            READER: {"reads": {"datasets/org/gated"}, "writes": ()},
            WRITER: {"reads": (), "writes": {"team"}},
        }
        yield running
    close_session()


def lines(*texts):
    return "".join(json.dumps({"text": text, "lang": "en"}) + "\n" for text in texts).encode()


def parquet(*texts):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": list(texts), "n": list(range(len(texts)))}), sink)
    return sink.getvalue().to_pybytes()


@cache
def make_tokenizer():
    """A tokenizer.json of bytes, by the library that transformers has it from."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    how = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(["a text"], trainers.BpeTrainer(vocab_size=260, **how))
    return tokenizer.to_str().encode()


def make_model():
    """Files of a tiny Llama; the weights are zeros, for nobody runs it."""
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, **shape}
    return {
        "README.md": CARD,
        "config.json": json.dumps(settings).encode(),
        "tokenizer.json": make_tokenizer(),
        "tokenizer_config.json": b'{"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}',
        "model.safetensors": save({"model.embed_tokens.weight": np.zeros((300, 8), np.float32)}),
        "modeling_tiny.py": b"raise SystemExit('code of a model must not run')\n",
        "pytorch_model.bin": b"not a pickle, but nobody looks",
    }


def published(hub, home, *addresses, text_field="text", **how):
    store = open_store(home)
    return datasets.from_hub(
        store, home / "work", "mine", addresses, Hub(endpoint=hub.url), text_field=text_field, **how
    )


def test_a_dataset_is_pinned_to_a_commit_and_comes_byte_for_byte_with_its_licence(hub, tmp_path):
    files = {"README.md": CARD, "data/a.jsonl": lines("one", "two"), "data/b.parquet": parquet("three", "four", "five")}
    repo = hub.add("datasets/org/texts", files)
    repo.tags["v1"] = repo.branches["main"]
    first = repo.branches["main"]
    repo.commit({**files, "data/a.jsonl": lines("newer")})
    made = published(hub, tmp_path, "hf://datasets/org/texts@v1")
    sizes = {file.path: file.sha256 for file in made.manifest.content.files}
    assert sizes == {path.split("/")[1]: hashlib.sha256(files[path]).hexdigest() for path in list(files)[1:]}
    assert made.packed.documents == 5
    uri = f"hf://datasets/org/texts@{first}"
    origin = {"uri": uri, "revision": "v1", "endpoint": hub.url, "gated": False, "license": "apache-2.0"}
    assert made.manifest.provenance.config == {"origins": [origin]}
    assert made.manifest.provenance.model_extra["sources"] == {
        "a.jsonl": [f"{uri}/data/a.jsonl"],
        "b.parquet": [f"{uri}/data/b.parquet"],
    }
    again = published(hub, tmp_path, f"hf://datasets/org/texts@{first[:40]}/data")
    assert again.manifest.version == made.manifest.version
    assert not list((tmp_path / "work" / "hub").glob("*/*"))
    newer = published(hub, tmp_path, "hf://datasets/org/texts/data/a.jsonl")
    assert newer.packed.documents == 1 and newer.manifest.version != made.manifest.version


def test_a_json_array_becomes_lines_and_text_files_become_documents(hub, tmp_path):
    rows = [{"text": f'row {n} [,] "}}', "n": n} for n in range(2000)]
    hub.add("datasets/org/alpaca", {"all.json": json.dumps(rows, indent=1).encode(), "more.json": lines("x", "y")})
    made = published(hub, tmp_path, "hf://datasets/org/alpaca")
    assert made.packed.documents == 2002
    sources = made.manifest.provenance.model_extra["sources"]
    assert {path.rpartition("/")[2] for of in sources.values() for path in of} == {"all.json", "more.json"}
    hub.add("datasets/org/books", {"books/a.txt": b"once", "books/b.txt": b"upon a time"})
    made = published(hub, tmp_path, "hf://datasets/org/books")
    assert made.packed.documents == 2
    (of,) = made.manifest.provenance.model_extra["sources"].values()
    assert of == [f"hf://datasets/org/books@{hub.repos['datasets/org/books'].branches['main']}/"]
    hub.add("datasets/org/torn", {"all.json": json.dumps(rows).encode()[:-9]})
    with pytest.raises(ValueError, match=r"element 2000 of the array is cut off"):
        published(hub, tmp_path, "hf://datasets/org/torn")


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        (
            {"README.md": SPLITS, "data/train-0.parquet": b"", "data/test-0.parquet": b""},
            "",
            r"2 splits.*default/train: hf://.*@main/data/train-\*; default/test",
        ),
        (
            {"train.jsonl": b"", "sub/dev.jsonl": b""},
            "",
            r"2 splits.*validation: hf://datasets/org/odd@main/sub/dev.jsonl",
        ),
        (
            {"odd.py": b"", "README.md": CARD},
            "",
            r"a program of its own \(odd.py\), which is not run.*refs/convert/parquet",
        ),
        ({"a.csv": b"text\nx\n"}, "/a.csv", r"a.csv is no JSON lines, Parquet or text.*refs/convert/parquet"),
        ({"a.pkl": b"", "b.jsonl": b""}, "/a.pkl", "a.pkl is a pickle"),
        ({"README.md": CARD}, "", "it holds no JSON lines"),
    ],
)
def test_what_is_no_data_or_several_splits_is_refused_before_a_byte_is_downloaded(hub, tmp_path, files, path, message):
    hub.add("datasets/org/odd", files)
    with pytest.raises(ValueError, match=message):
        published(hub, tmp_path, f"hf://datasets/org/odd{path}")
    assert hub.served == 0 and not hub.asked("GET", "/resolve/")


def test_a_named_split_and_the_only_split_are_taken(hub):
    hub.add("datasets/org/two", {"README.md": SPLITS, "data/train-0.parquet": b"x", "data/test-0.parquet": b"y"})
    opened = Hub(endpoint=hub.url).open("hf://datasets/org/two/data/train-*", "dataset")
    assert [file.path for file in data_files(opened)] == ["data/train-0.parquet"] and opened.license == "cc-by-4.0"
    everything = replace(opened, path="*")
    assert [file.path for file in data_files(everything)] == ["data/test-0.parquet", "data/train-0.parquet"]
    assert [file.path for file in data_files(replace(opened, path="README.md"))] == ["README.md"]


def test_a_busy_hub_is_asked_again_and_a_broken_connection_goes_on_where_it_broke(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    data = parquet(*(f"{n} {hashlib.sha256(b'%d' % n).hexdigest()}" for n in range(3000)))
    hub.add("datasets/org/texts", {"a.parquet": data})
    digest = hashlib.sha256(data).hexdigest()
    hub.busy, hub.broken[digest] = 1, 1000
    made = published(hub, tmp_path, "hf://datasets/org/texts")
    assert [file.sha256 for file in made.manifest.content.files] == [digest]
    assert hub.served == len(data) and not hub.broken


@pytest.mark.parametrize("large", [True, False])
def test_other_bytes_than_the_hub_lists_are_refused_and_nothing_is_published(hub, tmp_path, large):
    data = parquet("one") if large else lines("one")
    hub.add("datasets/org/texts", {"a.parquet" if large else "a.jsonl": data})
    key = hashlib.sha256(data).hexdigest() if large else "a.jsonl"
    hub.changed[key] = data.replace(b"one", b"two")
    with pytest.raises(IntegrityError, match=r"a\.\w+ arrived with other bytes"):
        published(hub, tmp_path, "hf://datasets/org/texts")
    assert not list(open_store(tmp_path).manifests("dataset"))


def test_files_that_arrived_are_not_asked_for_again(hub, tmp_path):
    first, second = parquet("one"), parquet("two")
    hub.add("datasets/org/texts", {"a.parquet": first, "b.parquet": second})
    hub.changed[hashlib.sha256(second).hexdigest()] = second[:-1] + b"?"
    with pytest.raises(IntegrityError):
        published(hub, tmp_path, "hf://datasets/org/texts")
    hub.changed, hub.served = {}, 0
    assert published(hub, tmp_path, "hf://datasets/org/texts").packed.documents == 2
    assert hub.served == len(second)


@pytest.mark.parametrize(
    ("token", "address", "error", "message", "remedy"),
    [
        ("", "hf://datasets/org/none", Unknown, "no dataset org/none at http", "HF_TOKEN"),
        (READER, "hf://datasets/org/none", Unknown, "no dataset org/none at http", "typing mistake"),
        ("", "hf://datasets/org/texts@v9", Unknown, "has no revision 'v9'", "branches and tags"),
        ("", "hf://datasets/org/texts/b*", Unknown, r"has nothing at 'b\*'", "a.jsonl"),
        (
            "",
            "hf://datasets/org/gated",
            Missing,
            "is gated",
            "Accept the terms at http://.*/datasets/org/gated, and set HF_TOKEN",
        ),
        (WRITER, "hf://datasets/org/gated", Missing, "is gated", "of the same account"),
        ("hf_" + "x" * 30, "hf://datasets/org/texts", Missing, "does not know the token", "HF_TOKEN"),
        ("", "hf://org/texts", ValueError, "names a model, and a dataset is needed", ""),
        ("", "hf://datasets/texts", ValueError, "namespace/name", ""),
    ],
)
def test_who_is_not_let_in_hears_why_and_what_to_do(hub, tmp_path, monkeypatch, token, address, error, message, remedy):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.add("datasets/org/texts", {"a.jsonl": lines("one")})
    hub.add("datasets/org/gated", {"a.jsonl": lines("one")}, gated=True)
    with pytest.raises(error, match=message) as caught:
        published(hub, tmp_path, address)
    assert re.search(remedy, getattr(caught.value, "remedy", ""))
    assert not token or token not in f"{caught.value} {caught.value.__dict__}"


def test_a_gated_dataset_comes_to_who_was_let_in_and_a_hub_that_is_away_is_told(hub, tmp_path, monkeypatch):
    hub.add("datasets/org/gated", {"a.parquet": parquet("one")}, gated=True)
    monkeypatch.setenv("HF_TOKEN", READER)
    made = published(hub, tmp_path, "hf://datasets/org/gated")
    assert made.manifest.provenance.config["origins"][0]["gated"] is True
    assert READER not in "".join(path.read_text("latin1") for path in tmp_path.rglob("*") if path.is_file())
    hub.busy = 9
    with pytest.raises(Missing, match="refuses further requests"):
        published(hub, tmp_path, "hf://datasets/org/gated")
    with pytest.raises(Missing, match="cannot be reached: no answer from 127.0.0.1:9"):
        Hub(endpoint="http://127.0.0.1:9").open("hf://datasets/org/gated", "dataset")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Missing, match="HF_HUB_OFFLINE is set"):
        published(hub, tmp_path, "hf://datasets/org/gated")


def test_a_model_is_a_signed_checkpoint_without_its_code_and_its_pickle(hub, tmp_path):
    files = make_model()
    repo = hub.add("models/org/tiny", files)
    store = open_store(tmp_path)
    ensure_key(tmp_path / "keys")
    made = base_models.from_hub(store, tmp_path, "tiny", "hf://org/tiny", Hub(endpoint=hub.url))
    assert {file.path for file in made.checkpoint.content.files} == set(files) - {
        "modeling_tiny.py",
        "pytorch_model.bin",
    }
    assert require_signed(store, tmp_path, made.checkpoint).key == made.key
    (origin,) = made.checkpoint.provenance.config["origins"]
    assert origin["uri"] == f"hf://org/tiny@{repo.branches['main']}" and origin["revision"] == "main"
    assert not hub.asked("GET", r"\.(py|bin)$") and not list((tmp_path / "work" / "hub").glob("*/*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.json": b'{"architectures": ["AForCausalLM"], "auto_map": {}}'}, "no code of a model is run"),
        ({"model.safetensors": None}, r"only a pickle \(pytorch_model.bin\).*refs/pr/NUMBER"),
        ({"config.json": None}, "no config.json"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "b.safetensors"}}'},
            "names b.safetensors, and the repository",
        ),
    ],
)
def test_a_model_that_training_cannot_start_from_is_refused_before_its_weights_come(hub, tmp_path, change, message):
    files = {**make_model(), **change}
    hub.add("models/org/tiny", {path: data for path, data in files.items() if data is not None})
    with pytest.raises(ValueError, match=message):
        base_models.from_hub(open_store(tmp_path), tmp_path, "tiny", "hf://org/tiny", Hub(endpoint=hub.url))
    assert not hub.asked("GET", "safetensors$")


@pytest.fixture
def ours(hub, tmp_path, monkeypatch):
    """A home with a checkpoint of the hub, and the token of somebody who may write to `team`."""
    hub.add("models/org/tiny", make_model())
    ensure_key(tmp_path / "keys")
    base_models.from_hub(open_store(tmp_path), tmp_path, "tiny", "hf://org/tiny", Hub(endpoint=hub.url))
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    return tmp_path


def test_a_push_makes_a_private_repository_with_what_was_signed_and_does_nothing_twice(hub, ours):
    store, client = open_store(ours), Hub(endpoint=hub.url)
    first = push(store, ours, "checkpoint/tiny", "hf://team/tiny", client, reason="for team B")
    repo = hub.repos["models/team/tiny"]
    assert repo.private and first.moved and first.created and first.uri == f"hf://team/tiny@{repo.branches['main']}"
    sent = repo.commits[repo.branches["main"]]
    digests = {file.path: file.sha256 for file in first.manifest.content.files if file.path != "README.md"}
    assert {p: hashlib.sha256(data).hexdigest() for p, data in sent.items() if p in digests} == digests
    assert sent.keys() == digests.keys() | {"README.md", ".gitattributes"}
    assert f"checkpoint/tiny@{first.manifest.version[:12]}" in repo.messages[-1]
    card, source = sent["README.md"].decode(), f"hf://org/tiny@{hub.repos['models/org/tiny'].branches['main']}"
    assert card.startswith("---\nlicense: apache-2.0\n") and "# A repository" in card
    assert f"| `{first.manifest.ref}` | apache-2.0 | {source} |" in card and "- `tokenizer/tiny@" in card
    hub.requests.clear()
    again = push(store, ours, "checkpoint/tiny", "hf://team/tiny", client)
    assert not again.moved and again.uri == first.uri
    assert not hub.asked("POST", "commit|preupload|batch") and len(repo.messages) == 2
    told = [(entry.action, entry.what) for entry in entries(store) if "push" in entry.action]
    assert [action for action, _ in told] == ["pushed model", "push model"] and told[0][1].endswith(first.uri)


def test_a_pushed_model_s_card_has_its_evaluation_and_what_it_was_made_from(hub, ours):
    store = open_store(ours)

    def made(kind, files, versions=(), **how):
        folder = ours / "made" / kind
        folder.mkdir(parents=True)
        for path, data in files.items():
            (folder / path).write_bytes(data)
        told = Provenance(name="tiny", created="2026-11-29T00:00:00+00:00", stage=kind, **how)
        return publish_for_signing(store, ours, folder, kind=kind, inputs=versions, provenance=told)

    base = next(iter(store.manifests("checkpoint", "tiny")))
    scores = made("evaluation", {"evaluation.json": b"{}"}, metrics={"bits_per_byte": 1.25, "arc_easy": 0.5})
    files = {"README.md": CARD, "model.onnx": b"graph"}
    model = made("model", files, (base.version,), inputs=(base.ref,), context=(scores.ref,))
    sign(store, ours, model)
    pushed = push(store, ours, "model/tiny", "hf://team/onnx", Hub(endpoint=hub.url), public=True)
    repo = hub.repos["models/team/onnx"]
    card = repo.commits[repo.branches["main"]]["README.md"].decode()
    assert not repo.private and pushed.manifest.ref == model.ref and "base_model:\n- org/tiny\n" in card
    assert f"By `{scores.ref}`." in card and "| bits_per_byte | 1.25 |" in card and f"- `{base.ref}`" in card
    assert f"| `{base.ref}` | apache-2.0 | hf://org/tiny@" in card


def test_what_somebody_else_has_there_is_overwritten_only_when_its_branch_is_named(hub, ours):
    store, client = open_store(ours), Hub(endpoint=hub.url)
    repo = hub.add("models/team/other", {"model-00001.safetensors": b"old", "notes.md": b"x"})
    with pytest.raises(ValueError, match="holds something else.*hf://team/other@main"):
        push(store, ours, "checkpoint/tiny", "hf://team/other", client)
    assert len(repo.messages) == 1
    onto = push(store, ours, "checkpoint/tiny", "hf://team/other@tuned", client)
    assert set(onto.deleted) == {"model-00001.safetensors", "notes.md"} and not onto.created
    assert repo.branches.keys() == {"main", "tuned"} and len(repo.commits[repo.branches["main"]]) == 3
    assert not push(store, ours, "checkpoint/tiny", "hf://team/other@tuned", client).moved


def test_a_push_is_refused_when_somebody_was_faster_has_no_right_or_the_artifact_is_damaged(hub, ours, monkeypatch):
    store, client = open_store(ours), Hub(endpoint=hub.url)
    repo = hub.add("models/team/busy", {})
    real = client.open

    def slowly(address, kind):
        source = real(address, kind)
        repo.commit({"other": b"x"}, message="meanwhile")
        return source

    monkeypatch.setattr(client, "open", slowly)
    with pytest.raises(Conflict, match="changed by somebody else meanwhile"):
        push(store, ours, "checkpoint/tiny", "hf://team/busy@main", client)
    assert "meanwhile" in repo.messages[-1] and next(iter(entries(store))).outcome == "failed"
    monkeypatch.setattr(client, "open", real)
    with pytest.raises(Missing, match="this token may not do that"):
        push(store, ours, "checkpoint/tiny", "hf://others/tiny", client)
    with pytest.raises(ValueError, match="what is pushed is signed"):
        push(store, ours, "tokenizer/tiny", "hf://team/tiny", client)
    (weights,) = [path for path in ours.glob("store/artifacts/checkpoint/**/model.safetensors")]
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match="model.safetensors"):
        push(store, ours, "checkpoint/tiny", "hf://team/fresh", client)
    assert "models/team/fresh" not in hub.repos


def test_the_commands_take_mirror_and_token_from_the_environment_and_leave_no_token(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", READER)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.add("datasets/org/gated", {"README.md": CARD, "a.parquet": parquet("one")}, gated=True)
    home = Home(tmp_path / "home")
    ran = home.ok("dataset", "publish", "mine", "hf://datasets/org/gated")
    (origin,) = ran.said["origins"]
    assert ran.said["documents"] == 1 and origin["license"] == "apache-2.0" and origin["endpoint"] == hub.url
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused = home.run("checkpoint", "publish", "tiny", "hf://org/tiny")
    assert refused.code == 6 and "HF_HUB_OFFLINE" in refused.said["error"]["message"], refused.said
    written = "".join(path.read_text("latin1") for path in tmp_path.rglob("*") if path.is_file())
    assert READER not in written + json.dumps(ran.said) + ran.stderr + refused.stderr


def test_a_card_names_base_and_data_as_the_hub_knows_them_and_leaves_out_the_others(hub):
    def made(kind, *uris):
        config = {"origins": [{"uri": uri} for uri in uris]} if uris else None
        return Manifest(content=Content(kind=kind, files=()), provenance=Provenance(name="x", config=config))

    matter = "license: mit\nbase_model: checkpoint/base@12ab\ndatasets:\n- dataset/mine@34cd\ntags:\n- headway\n"
    ours = f"---\n{matter}---\n\n# Tuned\n"
    ancestors = [
        made("checkpoint", "hf://org/tiny@1"),
        made("dataset", "hf://datasets/org/a@2"),
        made("dataset"),
        made("tokens"),
    ]
    for known, matter in ((ancestors, {"base_model": ["org/tiny"], "datasets": ["org/a"]}), (ancestors[2:], {})):
        text = card_for_hub(ours, known)
        head, _, body = text.removeprefix("---\n").partition("---\n")
        assert yaml.safe_load(head) == {"license": "mit", "tags": ["headway"], **matter} and body == "\n# Tuned\n"
        Hub(endpoint=hub.url).api._validate_yaml(text)
    with pytest.raises(ValueError, match="is not valid. Use a model id"):
        Hub(endpoint=hub.url).api._validate_yaml(ours)
