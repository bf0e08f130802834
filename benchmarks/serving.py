"""How fast answers come: Headway's server beside `transformers` generate behind the same kind of FastAPI, in one run.

    python -m benchmarks.serving [--tokens 32] [--rounds 5] [--threads 2] [--clients 1 4 16] [--variants int8]

One Llama of 29 M parameters made by its configuration, with random weights, exported by Headway. Each client sends one request
after the other; tokens a second are those of all clients, the percentiles those of whole answers. Rounds are interleaved; the
middle ratio of a round to its rival's counts, so what else the machine does falls on both. Goals: 1.5 times `transformers` at 1
client in fp32, 2 times with int8, 3 times at 16 clients. Each server has `--threads` threads of computation; clients run beside
them on the same cores. Greedy answers in fp32 are compared with those of `transformers`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.scratch import scratch

GOALS = {("fp32", 1): 1.5, ("int8", 1): 2.0, ("fp32", 16): 3.0}
RIVAL = "transformers"
VOCABULARY, CONTEXT = 8192, 1024
SHAPE = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
READY_SECONDS = 120.0
PROMPT = "def f{number}(values):\n    for value in values:\n"


@dataclass
class Way:
    """One server, and what was measured of it by number of clients: tokens a second a round, seconds of all answers."""

    url: str
    rates: dict[int, list[float]] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end as well
    if given.rival:
        serve_rival(Path(given.rival), port=given.port, threads=given.threads)
        return
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with scratch() as folder:
        checkpoint = make_checkpoint(folder / "checkpoint")
        models = {kind: export(checkpoint, folder / kind, kind) for kind in ("fp32", *given.variants)}
        with started(checkpoint, models, folder, threads=given.threads) as ways:
            equal = asyncio.run(measure(ways, given))
    print(json.dumps(report(ways, equal), indent=1))
    print("\n".join(table(ways)), file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"tokens": 32, "rounds": 5, "threads": 2, "port": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--variants", nargs="*", default=["int8"])
    parser.add_argument("--rival", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_checkpoint(folder: Path) -> Path:
    """Random weights; the tokenizer is learnt from Python's own library."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(path) for path in sorted(Path(os.__file__).parent.glob("*.py"))], trainer)
    # Narrow weights make all words alike, and a greedy answer a matter of the last digit.
    config = LlamaConfig(
        **SHAPE,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def export(checkpoint: Path, folder: Path, kind: str) -> Path:
    """A folder as the endpoint serves it; its golden answer is its own, for speed is what is asked for here."""
    from tasks.jobs.exporting.graph import build
    from tasks.jobs.serving.generation import Generation

    folder.mkdir()
    build(checkpoint, folder, precision=kind)
    generation = Generation(folder, 1)
    said = generation.complete(generation.encode("def "), 4)
    golden = {"prompts": [{"prompt": "def ", "completion": said.text, "tokens": said.tokens}]}
    (folder / "golden.json").write_text(json.dumps(golden), encoding="utf-8")
    return folder


@contextmanager
def started(checkpoint: Path, models: dict[str, Path], home: Path, *, threads: int) -> Iterator[dict[str, Way]]:
    """Every server, ready; those that are not asked compute nothing."""
    ways, processes = {}, []
    try:
        for kind, model in models.items():
            port, folder = free_port(), home / f"server-{kind}"
            folder.mkdir()
            told = {"model_folder": str(model), "model_ref": f"model/{kind}", "files": None, "port": port}
            told |= {"threads": threads, "outputs": str(folder / "outputs")}
            (folder / "serve.json").write_text(json.dumps(told))
            environment = {**os.environ, "HEADWAY_SERVE": str(folder), "HEADWAY_ATTEMPT": "1"}
            processes.append(subprocess.Popen([sys.executable, "-m", "tasks.jobs.serve"], env=environment))
            ways[kind] = Way(f"http://127.0.0.1:{port}")
        port = free_port()
        argv = ["--rival", str(checkpoint), "--port", str(port), "--threads", str(threads)]
        processes.append(subprocess.Popen([sys.executable, "-m", "benchmarks.serving", *argv]))
        ways[RIVAL] = Way(f"http://127.0.0.1:{port}")
        for way in ways.values():
            await_ready(way.url)
        yield ways
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def serve_rival(checkpoint: Path, *, port: int, threads: int) -> None:
    """What is written by hand: generate in a thread, one request after the other, behind FastAPI."""
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import uvicorn
    from fastapi import Body, FastAPI
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    worker, api = ThreadPoolExecutor(1), FastAPI()

    @torch.no_grad()
    def complete(prompt: str, most: int) -> dict[str, Any]:
        read = tokenizer(prompt, return_tensors="pt")
        said = network.generate(**read, max_new_tokens=most, do_sample=False, pad_token_id=0)
        tokens = said[0][read["input_ids"].shape[1] :]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return {"choices": [{"text": text}], "usage": {"completion_tokens": len(tokens)}}

    @api.post("/v1/completions")
    async def completions(body: dict[str, Any] = Body()) -> dict[str, Any]:  # noqa: B008
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(worker, complete, body["prompt"], body["max_tokens"])

    @api.get("/readyz")
    async def readyz() -> dict[str, bool]:
        return {"ready": True}

    uvicorn.run(api, host="127.0.0.1", port=port, log_level="error")


async def measure(ways: dict[str, Way], given: argparse.Namespace) -> dict[str, int]:
    """Ask every server in turn, round by round; greedy answers in fp32 that are the rival's, of how many."""
    equal = await compared(ways, given.tokens)
    for _ in range(given.rounds):
        for clients in given.clients:
            for way in ways.values():
                rate, seconds = await load(way.url, clients=clients, tokens=given.tokens)
                way.rates.setdefault(clients, []).append(rate)
                way.seconds.setdefault(clients, []).extend(seconds)
        print(f"{len(ways[RIVAL].rates[given.clients[-1]])} of {given.rounds} rounds", file=sys.stderr, flush=True)
    return equal


async def compared(ways: dict[str, Way], tokens: int) -> dict[str, int]:
    """It also warms every server."""
    texts = []
    for way in ways.values():
        async with httpx.AsyncClient(base_url=way.url, timeout=120, trust_env=False) as client:
            texts.append([(await complete(client, number, tokens))[2] for number in range(8)])
    same = sum(ours == theirs for ours, theirs in zip(texts[0], texts[-1], strict=True))
    return {"equal": same, "of": len(texts[0])}


async def load(url: str, *, clients: int, tokens: int) -> tuple[float, list[float]]:
    """Tokens a second of all clients together, and each answer's seconds; at least four answers."""
    each = max(1, 4 // clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def ask(first: int) -> list[tuple[float, int, str]]:
            return [await complete(client, first + 100 * number, tokens) for number in range(each)]

        began = time.perf_counter()
        answers = [answer for some in await asyncio.gather(*map(ask, range(clients))) for answer in some]
        seconds = time.perf_counter() - began
    return sum(count for _, count, _ in answers) / seconds, [took for took, _, _ in answers]


async def complete(client: httpx.AsyncClient, number: int, tokens: int) -> tuple[float, int, str]:
    """Seconds, tokens and text of an answer."""
    began = time.perf_counter()
    body = {"prompt": PROMPT.format(number=number), "max_tokens": tokens, "temperature": 0}
    said = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return time.perf_counter() - began, int(said["usage"]["completion_tokens"]), str(said["choices"][0]["text"])


def report(ways: dict[str, Way], equal: dict[str, int]) -> dict[str, Any]:
    told = {
        kind: {str(clients): {**figures(way, clients), "ratio": ratio(ways, kind, clients)} for clients in way.rates}
        for kind, way in ways.items()
    }
    machine = {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    return {
        **machine,
        "greedy_equal": equal,
        "goals": {f"{k} {c}": goal for (k, c), goal in GOALS.items()},
        "ways": told,
    }


def figures(way: Way, clients: int) -> dict[str, float]:
    """The middle round's tokens a second; percentiles of all answers, in seconds."""
    hundredths = statistics.quantiles(way.seconds[clients], n=100, method="inclusive")
    percentiles = {f"p{at}": round(hundredths[at - 1], 3) for at in (50, 95, 99)}
    return {"tokens_per_second": round(statistics.median(way.rates[clients]), 1), **percentiles}


def ratio(ways: dict[str, Way], kind: str, clients: int) -> float:
    """To the rival's tokens a second in the same round; the middle one."""
    pairs = zip(ways[kind].rates[clients], ways[RIVAL].rates[clients], strict=True)
    return round(statistics.median(ours / theirs for ours, theirs in pairs), 2)


def table(ways: dict[str, Way]) -> list[str]:
    lines = ["way           clients  tokens/s    p50 s    p95 s    p99 s  ratio  goal"]
    for kind, way in ways.items():
        for clients in way.rates:
            told, goal = figures(way, clients), GOALS.get((kind, clients), "")
            lines.append(
                f"{kind:<13}{clients:>8}{told['tokens_per_second']:>10}{told['p50']:>9}{told['p95']:>9}{told['p99']:>9}"
                f"{ratio(ways, kind, clients):>7}{goal:>6}"
            )
    return lines


def await_ready(url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/readyz", trust_env=False, timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} was not ready within {READY_SECONDS:g} s")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
