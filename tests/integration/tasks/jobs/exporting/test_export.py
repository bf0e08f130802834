"""What is proven of an export and what goes with it: variants, bits per byte, speed, the card, the reference; and encoders."""

import asyncio
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from base_material import write_tokens_of
from tiny_model import CORPUS, PROMPTS, VOCABULARY, files_of, make_checkpoint, make_gpt2, make_tokenizer

from tasks.common.errors import IntegrityError
from tasks.common.process import read_json, write_json
from tasks.config.serving import ExportConfig
from tasks.export import export_checks
from tasks.formats.mmididx import TokenWriter
from tasks.formats.model_folder import smaller_rungs

CONFIG = ExportConfig(golden_prompts=PROMPTS[:2], golden_tokens=12, reference_prompts=20, speed_seconds=0.01)
MADE_FROM = ["dataset/tiny@" + "a" * 64, "checkpoint/tiny@" + "b" * 64]
LICENSES = {
    MADE_FROM[0]: {"license": "cc-by-4.0", "origin": "hf://datasets/o/d@1"},
    MADE_FROM[1]: {"license": "", "origin": ""},
}
ALL = ("int8", "int4", "fp16", "bf16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: checkpoint/base@1\n---\n\n# Tiny\n")
    return folder


@pytest.fixture(scope="module")
def tokens(checkpoint, tmp_path_factory):
    folder = write_tokens_of(checkpoint, tmp_path_factory.mktemp("tokens") / "tokens")
    tokenizer, writer = make_tokenizer(), TokenWriter(folder / "heldout_text_document", VOCABULARY)
    for start in range(0, len(CORPUS) - 100, 12):
        writer.add_document([*tokenizer(CORPUS[start : start + 100])["input_ids"], 0])
    writer.close()
    return folder


def rank_of(folder, checkpoint, config, **inputs):
    """A rank's view of its job, as the program opens it."""
    from tasks.jobs.node.runtime import Rank

    (folder / "out").mkdir(parents=True)
    settings = {"export": config.model_dump(mode="json"), "threads": 1, "made_from": MADE_FROM, "licenses": LICENSES}
    return Rank(
        folder=folder,
        rank=0,
        world_size=1,
        attempt=1,
        settings=settings,
        inputs={"checkpoint": checkpoint, **inputs},
        output=folder / "out",
    )


@pytest.fixture(scope="module")
def exported(checkpoint, tokens, tmp_path_factory):
    from tasks.jobs.export import run

    rank = rank_of(
        tmp_path_factory.mktemp("job") / "job", checkpoint, CONFIG.model_copy(update={"variants": ALL}), tokens=tokens
    )
    return rank, run(rank)


def test_every_variant_is_a_whole_folder_that_a_server_takes_as_a_rung(exported):
    from tasks.jobs.serving.generation import Generation

    out, told = exported[0].output, read_json(exported[0].output / "variants.json")
    assert tuple(told["variants"]) == ALL
    assert [name for name, said in told["variants"].items() if not said["passed"]] == []
    rungs = smaller_rungs(out, "model/tiny@1", files_of(out))
    assert {rung["model_ref"] for rung in rungs} == {f"model/tiny@1/variants/{name}" for name in ALL}
    for rung in rungs:
        generation = Generation(Path(rung["folder"]), 1)
        assert generation.complete(generation.encode(PROMPTS[0]), 4).tokens
    sizes = {name: said["onnx_bytes"] for name, said in told["variants"].items()}
    assert sizes["int4"] < sizes["int8"] < sizes["fp16"] == sizes["bf16"] < exported[1]["metrics"]["onnx_bytes"]


def test_a_server_takes_a_variant_by_its_own_golden_answers_and_no_others(exported, tmp_path):
    from tasks.jobs.serving.model_process import ProcessRuntime
    from tasks.jobs.serving.program import RungSettings
    from tasks.jobs.serving.runtime import Gone

    async def prove(one):
        runtime = ProcessRuntime(files=one.files, named=one.model_ref)
        try:
            await runtime.start(one.folder, threads=1)
            return [(each.prompt, list(each.tokens)) for each in runtime.golden]
        finally:
            await runtime.close()

    rungs = smaller_rungs(exported[0].output, "model/tiny@1", files_of(exported[0].output))
    for told in (rungs[0], rungs[-1]):  # each of them answers, two of them in a process of their own
        one = RungSettings.model_validate(told)
        said = read_json(one.folder / "golden.json")["prompts"]
        assert asyncio.run(prove(one)) == [(each["prompt"], each["tokens"]) for each in said]
        assert [each["prompt"] for each in said] == list(CONFIG.golden_prompts) and all(each["tokens"] for each in said)
    folder = shutil.copytree(one.folder, tmp_path / "int4")
    said[1]["tokens"][-1] += 1
    write_json(folder / "golden.json", {"prompts": said})
    with pytest.raises(Gone, match="the golden prompt 'import ' was answered"):
        asyncio.run(prove(one.model_copy(update={"folder": folder, "files": None})))


def test_what_a_variant_loses_is_measured_beside_the_checkpoint_on_the_same_text(exported):
    metrics, told = exported[1]["metrics"], read_json(exported[0].output / "variants.json")["variants"]
    assert metrics["max_logit_error"] < 1e-4 and abs(metrics["loss"]) < 1e-5
    assert metrics["bits_per_byte"] == pytest.approx(metrics["bits_per_byte_original"], abs=2e-6)
    for name, said in told.items():
        expected = said["bits_per_byte"] / metrics["bits_per_byte_original"] - 1
        assert said["loss"] == pytest.approx(expected, abs=1e-6)
        assert metrics[f"{name}.loss"] == said["loss"]
        assert metrics[f"{name}.tokens_per_second_onnx"] > 0
    errors = [told[name]["max_logit_error"] for name in ("fp16", "bf16", "int4")]
    assert errors == sorted(errors) and errors[0] > metrics["max_logit_error"]


def test_no_speed_is_published(exported):
    published = [path.read_text() for path in exported[0].output.rglob("*.json")]
    published.append((exported[0].output / "README.md").read_text())
    assert not any(word in text for text in published for word in ("per_second", "slowdown", "seconds"))


def test_a_variant_that_loses_too_much_is_taken_out_and_told(exported, checkpoint, tokens, tmp_path):
    from tasks.jobs.exporting.comparison import Original, bits_of, read_sample
    from tasks.jobs.exporting.variants import Measured, make_variants

    config = CONFIG.model_copy(update={"variants": ("int8",)})
    rank = rank_of(tmp_path / "job", checkpoint, config, tokens=tokens)
    original, sample = Original(checkpoint), read_sample(checkpoint, tokens, most_bytes=10_000)
    better = bits_of(original.network, sample, rank) * 0.9
    told, metrics = make_variants(Measured(checkpoint, better, sample), config, rank, threads=1)
    said = told["variants"]["int8"]
    assert not said["passed"] and "more bits, and may need 2.00%" in said["why"]
    assert said["loss"] > 0.1 and metrics["int8.passed"] == 0
    assert not (rank.output / "variants" / "int8").exists()


def test_a_variant_that_does_not_run_is_left_out_and_the_model_is_not(checkpoint, tokens, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from tasks.jobs.export import run

    network = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        network.model.embed_tokens.weight[7, 7] = 1e6
    network.save_pretrained(tmp_path / "large")
    make_tokenizer().save_pretrained(tmp_path / "large")
    config = CONFIG.model_copy(update={"variants": ("fp16",)})
    rank = rank_of(tmp_path / "job", tmp_path / "large", config, tokens=tokens)
    result = run(rank)
    assert "beyond the range of fp16" in result["variants"]["fp16"]["why"]
    assert not (rank.output / "variants" / "fp16").exists()
    assert result["metrics"]["greedy_equal"] == 2


@pytest.mark.parametrize("below", ["", "variants/int8"])
def test_a_server_does_not_load_a_graph_that_reads_elsewhere(exported, below, tmp_path):
    """Fault 51, before load: the file exists where the graph points, and nothing of it is read."""
    import onnx

    from tasks.jobs.serving.generation import Generation

    folder = shutil.copytree(exported[0].output / below, tmp_path / "model")
    shutil.copyfile(folder / "model.onnx.data", tmp_path / "data")
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    next(e for e in graph.graph.initializer[0].external_data if e.key == "location").value = "../data"
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    with pytest.raises(IntegrityError, match=r"\.\./data"):
        Generation(folder, 1)


def test_variants_of_a_gpt2_come_from_its_own_graph(tokens, tmp_path):
    from tasks.jobs.export import run

    checkpoint = make_gpt2(tmp_path / "gpt2")
    config = CONFIG.model_copy(update={"variants": ("int8", "fp16")})
    result = run(rank_of(tmp_path / "job", checkpoint, config, tokens=tokens))
    assert [said["passed"] for said in result["variants"].values()] == [True, True]
    assert result["metrics"]["greedy_equal"] == 2 and result["metrics"]["max_logit_error"] < 1e-4


def test_variants_are_measured_on_held_out_text_or_not_made(checkpoint, tmp_path):
    from tasks.jobs.export import run

    with pytest.raises(ValueError, match="no held-out text"):
        run(rank_of(tmp_path / "job", checkpoint, CONFIG))
    with pytest.raises(ValueError, match="name each once"):
        ExportConfig(variants=("int8", "int8"))


def test_the_card_says_what_the_model_is_made_from_and_what_was_measured(exported):
    from tasks.jobs.export import lineage_digest

    text = (exported[0].output / "README.md").read_text()
    matter, words = yaml.safe_load(text.split("---")[1]), text.split("---", 2)[2]
    assert matter["license"] == "apache-2.0" and matter["base_model"] == "checkpoint/base@1"
    assert matter["datasets"] == [MADE_FROM[0]]
    assert matter["lineage_digest"] == lineage_digest(MADE_FROM) == lineage_digest(MADE_FROM[::-1])
    assert all(ref in words for ref in MADE_FROM)
    assert f"| `{MADE_FROM[0]}` | cc-by-4.0 | hf://datasets/o/d@1 |" in words
    assert f"| `{MADE_FROM[1]}` | not known | files of its publisher |" in words
    assert f"{exported[1]['metrics']['bits_per_byte']:.4f} (95 % interval " in words
    assert "It completes text" in words
    assert all(f"`variants/{name}/`" in words for name in ALL)


@pytest.mark.parametrize(
    ("name", "payload"),
    [("chat_template.jinja", "{{ messages }}"), ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}')],
)
def test_the_card_of_a_model_with_a_chat_template_does_not_say_that_it_only_completes_text(tmp_path, name, payload):
    from tasks.jobs.export import write_card

    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / name).write_text(payload)
    proof = {"max_logit_error": 0.0, "greedy_equal": 1, "greedy_total": 1}
    write_card(tmp_path, tmp_path, made_from=(), proof=proof, bits=None, variants={})
    text = (tmp_path / "README.md").read_text()
    assert "It answers chats" in text and "It completes text" not in text


def test_the_artifact_says_how_a_completion_ends(exported):
    assert read_json(exported[0].output / "generation_config.json")["eos_token_id"] == 0


def test_the_reference_is_what_an_endpoint_would_have_measured(exported):
    from tasks.formats.model_folder import LEVELS, quantiles_of
    from tasks.serving.monitor.anomalies import answers_of_reference

    told = read_json(exported[0].output / "reference.json")
    assert told["count"] == 22 and set(told["measures"]) == {"length", "entropy", "repetition", "odd"}
    for said in told["measures"].values():
        assert said["quantiles"] == sorted(said["quantiles"]) and len(said["quantiles"]) == LEVELS
    assert max(told["measures"]["length"]["quantiles"]) <= CONFIG.golden_tokens
    assert max(told["measures"]["entropy"]["quantiles"]) <= math.log(VOCABULARY)
    assert set(quantiles_of(told)) == {"length", "entropy", "odd", "repetition"}
    assert len(answers_of_reference(exported[0].output)) == 22


def test_few_answers_are_no_reference():
    from tasks.formats.model_folder import quantiles_of, summary

    few = summary({"odd": [0.0] * 19}, prompts=19, max_tokens=8)
    assert quantiles_of(few) == {} and quantiles_of(None) == {} and quantiles_of({"version": 7}) == {}
    many = summary({"odd": [number / 20 for number in range(21)]}, prompts=21, max_tokens=8)
    assert quantiles_of(many)["odd"] == pytest.approx([step / 20 for step in range(21)])


def checks(**metrics):
    plain = {"max_logit_error": 1e-6, "greedy_equal": 5.0, "greedy_total": 5.0, "loss": 0.0, "slowdown_low": 1.0}
    plain["logit_scale"] = 8.0
    config = ExportConfig(allow_slower=metrics.pop("allow_slower", False))
    return [check.name.split(",")[0] for check in export_checks({**plain, **metrics}, config) if not check.passed]


def test_a_model_that_is_another_one_or_slower_is_refused():
    assert checks() == checks(loss=-1e-4) == checks(slowdown_low=1.1) == []
    assert checks(max_logit_error=2e-4) == checks(max_logit_error=4e-4, logit_scale=30.0) == ["logit error"]
    assert checks(max_logit_error=2e-4, logit_scale=30.0) == []
    assert checks(loss=0.002) == checks(loss=-0.002) == checks(loss=math.nan) == ["bits per byte on held-out text"]
    assert checks(slowdown_low=1.11) == checks(slowdown_low=math.nan) == ["time a token"]
    assert checks(slowdown_low=1.5, allow_slower=True) == []


def test_the_interval_of_a_median_is_that_of_the_sign_test():
    from tasks.jobs.exporting.variants import outside

    assert [outside(pairs) for pairs in (1, 5, 6, 8, 9, 11, 15)] == [0, 0, 0, 0, 1, 1, 3]


def test_a_slow_side_is_found_though_the_machine_is_busy():
    """One side takes 1.5 times the other's time; every other pair is held up by something else, on either side."""
    from tasks.jobs.exporting.variants import Race

    noise = np.random.default_rng(1).choice([1.0, 1.0, 6.0], size=(40, 2, 15))
    slow = [Race(tuple(0.015 * a), tuple(0.010 * b)).told() for a, b in noise]
    even = [Race(tuple(0.010 * a), tuple(0.010 * b)).told() for a, b in noise]
    assert all(told["slowdown_low"] <= told["slowdown"] <= told["slowdown_high"] for told in slow + even)
    assert sum(told["slowdown_low"] > 1.1 for told in even) <= 2
    quiet = Race((0.015,) * 5, (0.010,) * 5).told()
    assert quiet["slowdown_low"] == pytest.approx(1.5) and quiet["tokens_per_second_torch"] == pytest.approx(100)


def test_both_sides_run_in_turns():
    from tasks.jobs.exporting.variants import FEWEST_PAIRS, race

    order = []
    sides = SimpleNamespace(onnx=lambda: order.append("o") or 3, torch=lambda: order.append("t") or 3)
    found = race(sides.onnx, sides.torch, seconds=0.0)
    assert len(found.onnx) == len(found.torch) == FEWEST_PAIRS
    assert "".join(order) == "ot" + "ot" + "to" + "ot" + "to" + "ot"


def test_an_answer_that_is_no_number_is_not_passed_over_though_it_comes_last():
    from tasks.jobs.exporting.comparison import Answer, parity

    good = Answer("a", None, [1], equal=True, logit_error=1e-4, logit_scale=5.0)
    bad = Answer("b", None, [1], equal=True, logit_error=math.nan, logit_scale=math.nan)
    found = parity([good, bad])
    assert math.isnan(found["max_logit_error"]) and math.isnan(found["logit_scale"])
    assert checks(**found) == ["logit error"]


def make_bert(folder):
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(5)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape, initializer_range=0.2)
    BertForMaskedLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_an_encoder_is_exported_by_torch_with_shapes_that_vary(tmp_path):
    import onnxruntime

    from tasks.jobs.export import run

    rank = rank_of(tmp_path / "job", make_bert(tmp_path / "bert"), CONFIG)
    result = run(rank)
    assert result["metrics"]["max_logit_error"] < 1e-4
    assert {"model.onnx", "model.onnx.data", "README.md", "parity.json"} <= {
        file["path"] for file in files_of(rank.output)
    }
    assert not (rank.output / "golden.json").exists() and not (rank.output / "genai_config.json").exists()
    text = (rank.output / "README.md").read_text()
    assert "not served by the completions endpoint" in text and "It fills in masked tokens" in text
    assert "It completes text" not in text
    session = onnxruntime.InferenceSession(rank.output / "model.onnx", providers=["CPUExecutionProvider"])
    for shape in ((1, 3), (4, 17)):
        given = {"input_ids": np.ones(shape, np.int64), "attention_mask": np.ones(shape, np.int64)}
        assert session.run(["logits"], given)[0].shape == (*shape, VOCABULARY)
    assert json.loads((rank.output / "parity.json").read_text()) == {
        "max_logit_error": result["metrics"]["max_logit_error"]
    }
