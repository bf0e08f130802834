"""The suite `code`: functions that the model completes greedily from signature and docstring. Does it parse, does it run?

What runs it is sandbox.py. A completion ends before the first line that is not indented, as in HumanEval (Chen et al. 2021), and
is greedy: so `pass_share` is pass@1 of one sample. Completions are never published.
"""

from __future__ import annotations

import ast
import doctest
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tasks.config.evaluation import SHIPPED, CodeSuiteConfig
from tasks.evaluation.scores import wilson
from tasks.jobs.evaluation.generating import before_end, begin
from tasks.jobs.evaluation.sandbox import Limits, best_limits, run_code
from tasks.jobs.evaluation.suites import Bench, Line, Suite, digest_of, files_of, lines_of, place_of

# The system calls that are refused to code that a model wrote, as a filter that bubblewrap loads. See seccomp(2),
# bpf(4).
#
# Refused are further processes and threads, sockets of every family, memory that no limit counts (System V, memfd), new
# namespaces, mounts, debugging, keys, and what would leave the group or the parent that ends it; and every call that is
# newer than Linux 5.1, of which libc can do without. Refused calls fail with EPERM, the newer ones with ENOSYS.


SETTING = "evaluation.code.problems"
SHIPPED_FILE = Path(__file__).with_name("data") / "functions.jsonl"


@dataclass(frozen=True)
class Problem:
    """A function without its body."""

    name: str
    prompt: str
    """Signature and docstring, with what it imports before them; ends in a line feed."""
    examples: str
    """The docstring: what is run are the examples in it, not those of what the model wrote."""


def code(bench: Bench) -> Suite | None:
    """Shares of the functions that parse, and that give what the examples say."""
    config = bench.config.code
    if not config.problems:
        return None
    problems = read_problems(bench)
    limits = best_limits(limits_of(config), fall_back=config.allow_without_namespaces)
    results: list[str] = []
    encoded = (bench.tokenizer.encode(each.prompt, add_special_tokens=False).ids for each in problems)
    prompts = [[*bench.opening, *ids] for ids in encoded]
    longest = max(map(len, prompts))
    if longest >= bench.context:
        raise ValueError(
            f"{SETTING}: a prompt has {longest} tokens, and the model takes {bench.context}: leave the longest out, or "
            "measure a model with a longer context"
        )
    rows = begin("code", bench, prompts, config.tokens)()
    for problem, row in zip(problems, rows, strict=True):
        bench.check_time()
        results.append(judge(problem, bench.tokenizer.decode(before_end(row, bench.eod_id)), limits))
    outcomes = Counter(results)
    by_problem = {
        "parse_share": "".join("01"[one != "unparsed"] for one in results),
        "pass_share": "".join("01"[one == "passed"] for one in results),
    }
    details = {
        "outcomes": dict(sorted(outcomes.items())),
        "namespaces": limits.namespaces,
        "sha256": digest_of(files_of(_place(bench))),
    }
    samples = outcomes.total()
    counts = {"parse": samples - outcomes["unparsed"], "pass": outcomes["passed"]}
    metrics: dict[str, float] = {}
    for name, count in counts.items():
        share = wilson(count, samples, confidence=bench.config.confidence)
        values = {"count": float(count), "share": share.estimate, "low": share.low, "high": share.high}
        metrics |= {f"{name}_{part}": value for part, value in values.items()}
    return Suite(metrics, len(results), problems=by_problem, details=details)


def limits_of(config: CodeSuiteConfig) -> Limits:
    """What one completion may use."""
    return Limits(
        seconds=float(config.seconds),
        cpu_seconds=config.cpu_seconds,
        memory_bytes=config.memory_mib << 20,
    )


def read_problems(bench: Bench) -> list[Problem]:
    """The problems that the settings name. Raises ValueError, with the line, for what is no function with examples."""
    return [problem_of(line) for line in lines_of(_place(bench), setting=SETTING, fields=("name", "prompt"))]


def problem_of(line: Line) -> Problem:
    """The function of a record. Raises ValueError for a prompt that is none, or has no examples."""
    name, prompt = line.record["name"], line.record["prompt"].rstrip() + "\n"
    try:
        functions = [node for node in ast.parse(prompt).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{SETTING}: {line.place}: the prompt of {name} is not Python ({error})") from None
    docstring = (ast.get_docstring(functions[-1]) or "") if functions else ""
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError as error:
        raise ValueError(f"{SETTING}: {line.place}: the examples of {name} cannot be read ({error})") from None
    if not examples:
        raise ValueError(f"{SETTING}: {line.place}: {name} must end in a function's docstring with examples (>>> ...)")
    return Problem(name, prompt, docstring)


def judge(problem: Problem, text: str, limits: Limits) -> str:
    """What became of a completion: `unparsed`, or what the sandbox says."""
    source = problem.prompt + body_of(text)
    return run_code(source, problem.examples, limits) if parses(source) else "unparsed"


def body_of(text: str) -> str:
    """What belongs to the function: up to the first line that is neither empty nor indented."""
    kept = takewhile(lambda line: not line.strip() or line[0] in " \t", text.split("\n"))
    return "\n".join(kept) + "\n"


def parses(source: str) -> bool:
    """Whether it is Python, and its last function has a body behind the docstring."""
    try:
        last = ast.parse(source).body[-1]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(last, ast.FunctionDef) and len(last.body) > 1


def _place(bench: Bench) -> Path:
    ref = bench.config.code.problems
    return SHIPPED_FILE if ref == SHIPPED else place_of(bench, ref, setting=SETTING)
