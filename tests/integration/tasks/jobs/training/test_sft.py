"""Supervised fine-tuning: the answers of conversations alone are learnt, the same on any number of ranks and after a kill."""

import json

import numpy as np
import pytest
import torch
from conversation_material import make_chat_base, write_chat_tokens
from safetensors.torch import load_file
from training_runs import Forks, error, last_lines, numbers, result, said_by

from tasks.config.engines.deepspeed import ds_config
from tasks.config.evaluation import EvaluationConfig
from tasks.config.training import DeepspeedConfig, ExecutionConfig, LoraConfig, TrainingConfig
from tasks.data.tokenizing.rows import count_rows
from tasks.formats.mmididx import open_split, prefixes
from tasks.jobs.data.samples import NOT_LEARNED, Shares, batch_of, open_conversations
from tasks.jobs.evaluation.heldout import encode_for, read_heldout
from tasks.jobs.training.starting import load_base, require_packable

CONFIG = TrainingConfig(
    model="chat",
    objective="sft",
    base="checkpoint/tiny",
    sequence_length=96,
    global_batch_size=8,
    micro_batch_size=4,
    steps=6,
    warmup_steps=1,
    learning_rate=2e-3,
)
PACKED = CONFIG.model_copy(
    update={"packing": True, "sequence_length": 128, "global_batch_size": 4, "micro_batch_size": 2}
)
KILLED_AFTER_4 = """
import os, time
from tasks.jobs.checkpoint.files import manifests
from tasks.jobs.node.runtime import Rank
told = Rank.metrics
def metrics(self, **values):
    told(self, **values)
    if values["step"] == 4:
        while not list(manifests(self.folder / "checkpoints")):
            time.sleep(0.05)
        os._exit(9)
Rank.metrics = metrics
"""


@pytest.fixture(scope="module")
def launch(forks):
    return forks


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_chat_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def tokens(base, tmp_path_factory):
    return write_chat_tokens(tmp_path_factory.mktemp("preprocessing") / "job", base)


def run(launch, job, tokens, base, config=CONFIG, *, ranks=1, fault="", attempt=1, more=None, **execution):
    if attempt == 1:
        job.mkdir()
        settings = {"training": config.model_dump(mode="json"), "checkpoint_every_steps": 3, "keep_checkpoints": 2}
        inputs = {"tokens": str(tokens), "base": str(base)}
        spec = {
            "program": "tasks.jobs.train",
            "settings": {**settings, "execution": execution, **(more or {})},
            "inputs": inputs,
        }
        (job / "config.json").write_text(json.dumps(spec))
    return launch(job, ranks=ranks, fault=fault, attempt=attempt)


def losses(job):
    return [values[0] for _, values in sorted(numbers(job).items())]


@pytest.fixture(scope="module")
def alone(launch, tokens, base, tmp_path_factory):
    job = tmp_path_factory.mktemp("jobs") / "alone"
    assert run(launch, job, tokens, base, heldout_every_steps=3) == [0], said_by(job)
    return job


def test_tokens_and_masks_lie_side_by_side(tokens):
    about = json.loads((tokens / "tokens.json").read_text())
    for split in ("train", "heldout"):
        rows, masks = open_split(tokens, split), open_split(tokens, split, masks=True)
        assert np.array_equal(rows.lengths, masks.lengths) and masks.tokens.dtype == np.uint8
        assert about["answers"][split] == masks.tokens[:].sum() < len(rows.tokens) / 2
    assert about["turn_ends"] == [0]
    assert "{{ '[assistant]" in (tokens / "tokenizer" / "chat_template.jinja").read_text()


def test_the_first_loss_is_that_of_the_answers_under_the_base(alone, tokens, base):
    """As transformers reads the conversations and computes the loss, of the first global batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    marked = tokenizer.chat_template.replace("message['content'] + eos_token", "'' }}{{ message['content'] + eos_token")
    assert marked != tokenizer.chat_template
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    source = open_conversations(tokens, CONFIG)
    total = count = 0
    for row in source.batch(0, CONFIG.global_batch_size):
        text = tokenizer.decode(np.where(row < 0, ~row, row)[: np.flatnonzero(row >= 0)[-1] + 1])
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
        labels = torch.full_like(ids, -100)
        before = 0
        for answer in text.split("[assistant]\n")[1:]:  # from there to the end-of-turn token
            before = text.index("[assistant]\n", before) + len("[assistant]\n")
            start = len(tokenizer(text[:before], add_special_tokens=False).input_ids)
            stop = len(tokenizer(text[:before] + answer.split("<|endoftext|>")[0] + "<|endoftext|>").input_ids)
            labels[0, start:stop] = ids[0, start:stop]
        with torch.no_grad():
            logits = network(input_ids=ids).logits
        total += torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum", ignore_index=-100)
        count += int((labels[0, 1:] != -100).sum())
    assert losses(alone)[0] == pytest.approx(float(total / count), rel=1e-4)


def test_losses_are_the_same_on_two_ranks_and_with_other_micro_batches(launch, alone, tokens, base, tmp_path):
    two = tmp_path / "two"
    config = CONFIG.model_copy(update={"micro_batch_size": 1})
    assert run(launch, two, tokens, base, config, ranks=2) == [0, 0], said_by(two)
    assert losses(two) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(alone)[-1] < losses(alone)[0] - 0.5


@pytest.mark.long
def test_fsdp_and_adapters_give_the_same_losses_on_any_number_of_ranks(launch, tokens, base, tmp_path):
    config = CONFIG.model_copy(update={"lora": LoraConfig(rank=2, alpha=4.0), "learning_rate": 2e-2})
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(launch, one, tokens, base, config) == [0], said_by(one)
    assert run(launch, two, tokens, base, config, ranks=2, parallel="fsdp") == [0, 0], said_by(two)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert losses(one)[-1] < losses(one)[0]


def test_held_out_answers_are_those_of_a_base_whose_tokenizer_is_written_otherwise(tokens, base, tmp_path):
    heldout = read_heldout(tokens, EvaluationConfig(min_documents=1))
    rules = json.loads((base / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules, indent=4))
    assert (tmp_path / "tokenizer.json").read_bytes() != (tokens / "tokenizer" / "tokenizer.json").read_bytes()
    assert encode_for(tmp_path, tokens, heldout) is heldout.encoded
    rules["model"]["vocab"] |= {"another word": len(rules["model"]["vocab"]) + 9}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(ValueError, match="has another tokenizer than the held-out conversations"):
        encode_for(tmp_path, tokens, heldout)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "packing"), [(2, True), (3, False)])
def test_deepspeed_gives_the_same_losses(alone, packed_alone, tokens, base, tmp_path, stage, packing):
    config = (PACKED if packing else CONFIG).model_copy(update={"engine": "deepspeed", "micro_batch_size": 2})
    execution = ExecutionConfig(deepspeed=DeepspeedConfig(zero_stage=stage))
    more = {"deepspeed": ds_config(config, execution), "execution": execution.model_dump(mode="json")}
    job = tmp_path / "job"
    forks = Forks('import os\nos.environ["DS_ACCELERATOR"] = "cpu"\nimport deepspeed\n')
    try:
        assert run(forks, job, tokens, base, config, ranks=2, more=more) == [0, 0], said_by(job)
    finally:
        forks.close()
    assert losses(job) == pytest.approx(losses(packed_alone if packing else alone), rel=1e-4)


@pytest.mark.long
def test_adapters_under_deepspeed_give_the_losses_of_one_rank_also_after_a_kill(launch, tokens, base, tmp_path):
    changed = {"lora": LoraConfig(rank=2, alpha=4.0), "learning_rate": 2e-2}
    one, job = tmp_path / "one", tmp_path / "job"
    assert run(launch, one, tokens, base, CONFIG.model_copy(update=changed)) == [0], said_by(one)
    config = CONFIG.model_copy(update={**changed, "engine": "deepspeed", "micro_batch_size": 2})
    execution = ExecutionConfig(deepspeed=DeepspeedConfig(zero_stage=2))
    more = {"deepspeed": ds_config(config, execution), "execution": execution.model_dump(mode="json")}
    forks = Forks('import os\nos.environ["DS_ACCELERATOR"] = "cpu"\nimport deepspeed, peft\n')
    try:
        assert run(forks, job, tokens, base, config, ranks=2, more=more, fault=KILLED_AFTER_4) == [9, 9]
        assert run(forks, job, tokens, base, config, ranks=2, attempt=2) == [0, 0], said_by(job)
    finally:
        forks.close()
    assert result(job)["resumed_from_step"] == 3
    assert losses(job) == pytest.approx(losses(one), rel=1e-4)
    written = [load_file(each / "out" / "model.safetensors") for each in (one, job)]
    before = load_file(base / "model.safetensors")
    assert written[0].keys() == written[1].keys() == before.keys()
    assert any(not torch.equal(before[name], written[1][name]) for name in before)
    for name, tensor in written[0].items():
        torch.testing.assert_close(written[1][name], tensor, rtol=1e-3, atol=1e-4)
    states = list((job / "checkpoints").rglob("*model_states.pt"))
    kept = [torch.load(file, map_location="cpu", weights_only=False)["module"] for file in states]
    assert kept and all(
        ".lora_" in name for module in kept for name in module
    )  # the base's weights are in no checkpoint


def test_a_kill_changes_nothing(launch, alone, tokens, base, tmp_path):
    job = tmp_path / "killed"
    assert run(launch, job, tokens, base, fault=KILLED_AFTER_4, heldout_every_steps=3) == [9]
    assert run(launch, job, tokens, base, attempt=2) == [0], said_by(job)
    assert result(job)["resumed_from_step"] == 3 and numbers(job) == numbers(alone)
    assert (job / "out" / "model.safetensors").read_bytes() == (alone / "out" / "model.safetensors").read_bytes()


def test_held_out_answers_are_measured(alone):
    figures = [line["heldout_bits_per_byte"] for line in last_lines(alone).values() if "heldout_bits_per_byte" in line]
    assert len(figures) == 2 and figures[1] < figures[0]
    assert result(alone)["metrics"]["conversations_left_out"] == 0


def test_the_card_says_that_it_answers_chats(alone):
    text = (alone / "out" / "README.md").read_text()
    assert "It was tuned on the answers of conversations" in text and "It completes text" not in text


def test_long_conversations_are_left_out_whole_and_counted(launch, tokens, base, tmp_path):
    sizes = open_split(tokens, "train").lengths
    length = int(np.median(sizes)) - 1
    config = CONFIG.model_copy(update={"sequence_length": length, "steps": 2})
    source = open_conversations(tokens, config)
    assert source.left_out == int((sizes > length + 1).sum()) > 0
    job = tmp_path / "job"
    assert run(launch, job, tokens, base, config) == [0], said_by(job)
    assert result(job)["metrics"]["conversations_left_out"] == source.left_out
    short = CONFIG.model_copy(update={"sequence_length": 4})
    with pytest.raises(
        ValueError, match=r"the shortest of \d+ conversations has \d+ tokens.*raise training.sequence_length"
    ):
        open_conversations(tokens, short)


def test_padding_is_read_by_no_token_and_learnt_from_none(tokens):
    source = open_conversations(tokens, CONFIG)
    rows = torch.from_numpy(source.rows(np.arange(8)))
    batch = batch_of(rows, None)
    assert batch.inputs.shape[1] < CONFIG.sequence_length  # cut behind the last answer of the batch
    for row, inputs, targets in zip(rows, batch.inputs, batch.targets, strict=True):
        learnt = (row[1:] >= 0).nonzero()[:, 0]
        assert torch.equal((targets != NOT_LEARNED).nonzero()[:, 0], learnt)
        assert torch.equal(targets[learnt], row[1:][learnt]) and (inputs >= 0).all()


def test_what_is_learnt_must_be_what_the_tokens_are_of(launch, tokens, base, tmp_path):
    job = tmp_path / "job"
    config = CONFIG.model_copy(update={"objective": "pretrain"})
    assert run(launch, job, tokens, base, config) == [1]
    assert "the tokens are of conversations, and training.objective is pretrain: set it to sft" in error(job)["message"]


def conversations_of(batch, losses=None):
    """Inputs and targets of each conversation up to its last answer, and the sum of its losses."""
    places = torch.zeros_like(batch.inputs) + torch.arange(batch.inputs.shape[1])
    places = places if batch.positions is None else batch.positions
    each = torch.zeros(batch.inputs.shape) if losses is None else losses
    for inputs, targets, at, nats in zip(batch.inputs, batch.targets, places, each, strict=True):
        begins = (at == 0).nonzero()[:, 0].tolist()
        for begin, end in zip(begins, [*begins[1:], len(at)], strict=True):
            stop = begin + int((targets[begin:end] != NOT_LEARNED).nonzero()[-1]) + 1
            yield (
                (tuple(inputs[begin:stop].tolist()), tuple(targets[begin:stop].tolist())),
                float(nats[begin:end].sum()),
            )


def all_of(source):
    """What conversations_of gives for each sample by itself."""
    rows = torch.from_numpy(source.rows(np.arange(source.count)))
    return [each for row in rows.split(1) for each in conversations_of(batch_of(row, None))]


def alone_and_packed(tokens, **changed):
    config = PACKED.model_copy(update=changed)
    return open_conversations(tokens, config.model_copy(update={"packing": False})), open_conversations(tokens, config)


def test_every_conversation_is_packed_whole_and_once_an_epoch(tokens):
    alone, packed = alone_and_packed(tokens)
    assert packed.count < 0.6 * alone.count and packed.conversations == alone.conversations == alone.count
    assert packed.mean_size > 1.6 * alone.mean_size
    assert count_rows(prefixes(tokens, "train"), PACKED.sequence_length, PACKED.seed) == packed.count
    assert sorted(all_of(packed)) == sorted(all_of(alone))
    epochs = [packed.batch(epoch * packed.count, packed.count).tolist() for epoch in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    alone, packed = alone_and_packed(tokens, sequence_length=int(np.median(open_split(tokens, "train").lengths)) - 1)
    assert packed.left_out == alone.left_out > 0 and sorted(all_of(packed)) == sorted(all_of(alone))


def test_no_conversation_is_read_twice_by_two_ranks(tokens):
    _, packed = alone_and_packed(tokens)
    size = packed.count // 2 * 2
    parts = [Shares(rank, 2, size, 1).micro_batches(packed, 0) for rank in (0, 1)]
    read = [each for part in parts for batch in part for each, _ in conversations_of(batch)]
    whole = Shares(0, 1, size, size).micro_batches(packed, 0)
    assert read == [each for batch in whole for each, _ in conversations_of(batch)]
    assert len(read) == len(set(read)) > packed.conversations / 2


def test_each_conversation_has_the_loss_that_it_has_alone(tokens, base):
    network = load_base(base).eval()
    losses = []
    for source in alone_and_packed(tokens):
        batch = batch_of(torch.from_numpy(source.rows(np.arange(source.count))), None)
        with torch.no_grad():
            logits = network(input_ids=batch.inputs, position_ids=batch.positions, use_cache=False).logits
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        losses.append(dict(conversations_of(batch, each.view(batch.targets.shape))))
    assert batch.positions is not None and losses[0].keys() == losses[1].keys()
    for conversation, loss in losses[0].items():
        assert losses[1][conversation] == pytest.approx(loss, rel=1e-5)


@pytest.fixture(scope="module")
def packed_alone(launch, tokens, base, tmp_path_factory):
    job = tmp_path_factory.mktemp("jobs") / "packed"
    assert run(launch, job, tokens, base, PACKED) == [0], said_by(job)
    return job


def test_packed_rows_give_the_same_losses_on_two_ranks(launch, packed_alone, tokens, base, tmp_path):
    two = tmp_path / "two"
    assert run(launch, two, tokens, base, PACKED, ranks=2, parallel="fsdp") == [0, 0], said_by(two)
    assert losses(two) == pytest.approx(losses(packed_alone), rel=1e-4)
    figures = result(packed_alone)["metrics"]
    assert figures["conversations"] == open_split(tokens, "train").document_count
    assert losses(packed_alone)[-1] < losses(packed_alone)[0] - 0.5


def test_a_kill_changes_nothing_of_packed_rows(launch, packed_alone, tokens, base, tmp_path):
    job = tmp_path / "killed"
    assert run(launch, job, tokens, base, PACKED, fault=KILLED_AFTER_4) == [9]
    assert run(launch, job, tokens, base, PACKED, attempt=2) == [0], said_by(job)
    assert result(job)["resumed_from_step"] == 3 and numbers(job) == numbers(packed_alone)
    written = [(each / "out" / "model.safetensors").read_bytes() for each in (job, packed_alone)]
    assert written[0] == written[1]


def test_a_base_that_reads_on_over_positions_is_not_packed(base):
    from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

    require_packable(load_base(base))
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    others = BloomForCausalLM(BloomConfig(n_head=2, **shape)), MambaForCausalLM(MambaConfig(state_size=4, **shape))
    for network in others:
        with pytest.raises(
            ValueError, match=rf"training\.packing: in a row of {type(network).__name__} a conversation"
        ):
            require_packable(network)
