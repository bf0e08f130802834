"""What runs a model, in a process of its own: greedy answers, whole characters, stops, limits, seeds, places that are freed."""

import asyncio
import json
import random

import pytest
from serving_stand import asked, whole
from tiny_model import CONTEXT
from waiting import limit

from tasks.jobs.serving.decoder import ROWS
from tasks.jobs.serving.generation import ByteLevelText, TextStream
from tasks.jobs.serving.model_process import ProcessRuntime
from tasks.jobs.serving.runtime import Ask, Unfit
from tasks.storage.manifest import describe


@pytest.fixture(scope="module")
def stand(model):
    """A runtime that is up, and what runs coroutines in its loop."""
    runtime = ProcessRuntime(files=describe(model), named="tiny")
    with asyncio.Runner() as runner:
        runner.run(runtime.start(model, threads=1))
        yield runtime, runner.run
        runner.run(runtime.close())


def test_greedy_answers_are_the_golden_ones(stand, answers, golden):
    runtime, run = stand
    assert runtime.up and runtime.context_length == CONTEXT
    for each, known in zip(golden, answers, strict=True):
        said = run(whole(runtime, asked(each)))
        assert said.text == known["completion"]
        assert said.ending.tokens in ((), each.tokens)
        assert said.ending.completion_tokens == len(each.tokens)
        assert said.ending.finish_reason == ("stop" if each.tokens[-1] == 0 else "length")


def test_requests_that_join_at_different_times_change_no_answer(stand, answers):
    runtime, run = stand
    chance = random.Random(7)
    known = [answers[number % len(answers)] for number in range(8)]

    async def together():
        asks = [Ask(each["prompt"], len(each["tokens"])) for each in known]
        late = [whole(runtime, ask, after=chance.random() * 0.05) for ask in asks]
        long = whole(runtime, Ask("def ", 200, temperature=1.0, seed=1))
        return (await asyncio.gather(*late, long))[:-1]

    for said, each in zip(run(together()), known, strict=True):
        assert said.text == each["completion"]
        assert said.ending.tokens in ((), tuple(each["tokens"]))


def test_pieces_are_the_whole_text_and_split_no_character(stand, model):
    runtime, run = stand
    text = ByteLevelText(json.loads((model / "tokenizer.json").read_text()))
    for seed in range(4):
        said = run(whole(runtime, Ask("class ", 120, temperature=1.5, seed=seed)))
        assert len(said.pieces) > 1 and all(piece.text for piece in said.pieces)
        if said.ending.tokens:
            ended = said.ending.tokens[-1] == 0
            assert said.text == text.decode(said.ending.tokens[:-1] if ended else said.ending.tokens)
            assert sum(piece.tokens for piece in said.pieces) <= said.ending.completion_tokens


def test_a_stop_text_ends_an_answer_before_it(stand, answers):
    runtime, run = stand
    known = next(each for each in answers if len(each["completion"]) > 12)
    begin = len(known["completion"]) // 2
    stop = known["completion"][begin : begin + 3]
    first = known["completion"].index(stop)
    said = run(whole(runtime, Ask(known["prompt"], 24, stop=("nowhere in it", stop))))
    assert (said.text, said.ending.finish_reason) == (known["completion"][:first], "stop")


def test_what_cannot_be_completed_is_unfit_and_harms_no_other(stand, golden):
    runtime, run = stand
    for prompt in ("x = 1\n" * 300, "", "a\x00b", "half \ud83d"):
        with pytest.raises(Unfit):
            run(whole(runtime, Ask(prompt, 4)))
    assert runtime.up and run(whole(runtime, asked(golden[0]))).ending.completion_tokens == len(golden[0].tokens)


def test_an_answer_ends_with_the_context(stand, model):
    runtime, run = stand
    prompt = "x = 1\n" * 40
    said = run(whole(runtime, Ask(prompt, 500, temperature=2.0, seed=3)))
    total = said.ending.prompt_tokens + said.ending.completion_tokens
    assert total == CONTEXT or (said.ending.finish_reason == "stop" and total < CONTEXT)


def test_a_request_that_is_closed_frees_its_place(stand, golden):
    runtime, run = stand

    async def give_up():
        streams = [runtime.complete(Ask("return self.", 240, temperature=1.0, seed=n)) for n in range(ROWS * 2)]
        firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.wait(firsts, return_when=asyncio.FIRST_COMPLETED)
        for first in firsts:
            first.cancel()
        await asyncio.gather(*firsts, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        return await asyncio.wait_for(whole(runtime, asked(golden[1])), limit(20))

    said = run(give_up())
    assert said.ending.completion_tokens == len(golden[1].tokens)
    assert runtime.waiting == 0


def test_a_seed_repeats_an_answer_also_beside_others(stand):
    runtime, run = stand

    async def drawn(*seeds):
        asks = [Ask("def ", 40, temperature=1.0, top_p=0.9, seed=seed) for seed in seeds]
        return [said.text for said in await asyncio.gather(*(whole(runtime, ask) for ask in asks))]

    alone = run(drawn(5))
    many = run(drawn(5, 6, -7, 5, None, None))
    assert many[0] == many[3] == alone[0]
    assert len(set(many)) == 5


def test_a_narrow_nucleus_is_greedy(stand, answers):
    runtime, run = stand
    known = answers[0]
    said = run(whole(runtime, Ask(known["prompt"], len(known["tokens"]), temperature=1.0, top_p=1e-9, seed=1)))
    assert said.text == known["completion"]


def test_entropy_is_told_where_the_runtime_knows_it(stand, model, golden):
    from tasks.jobs.serving.generation import Generation

    runtime, run = stand
    told = run(whole(runtime, asked(golden[0]))).ending.entropy
    generation = Generation(model, 1)
    alone = generation.complete(generation.encode(golden[0].prompt), len(golden[0].tokens), measure=True).entropy
    assert told == pytest.approx(alone, abs=1e-4)
    assert run(whole(runtime, asked(golden[0], measure=False))).ending.entropy is None


def test_text_comes_in_whole_characters_and_never_beyond_a_stop(model):
    text = ByteLevelText(json.loads((model / "tokenizer.json").read_text()))
    numbers = {text.bytes_of(number): number for number in range(300)}
    said = "naïve 漢字 🙂 e\u0301"
    tokens = [numbers[bytes([byte])] for byte in said.encode()]
    stream = TextStream(text)
    pieces = [stream.add(token) for token in tokens]
    assert [piece for piece in pieces if piece] == list(said) and stream.end() == ""
    chance = random.Random(3)
    for _ in range(300):
        tokens = [chance.randrange(300) for _ in range(chance.randrange(30))]
        stop = tuple(text.decode([chance.randrange(300), chance.randrange(300)]) for _ in range(2))
        stream = TextStream(text, [word for word in stop if word])
        told = "".join(stream.add(token) for token in tokens) + stream.end()
        wanted = text.decode(tokens)
        cuts = [wanted.find(word) for word in stop if word and word in wanted]
        assert told == (wanted[: min(cuts)] if cuts else wanted)
