"""Answers of a made-up endpoint: what a server would have measured, drawn by a seed."""

from dataclasses import replace

import numpy as np

from tasks.formats.answers import Answer


def answers(count, *, seed, begins=0.0, **more):
    """So many answers, a second apart. Lengths, ends and times hang together as those of a real endpoint do."""
    chance = np.random.default_rng(seed)
    lengths = np.minimum(chance.geometric(1 / 40, count), 64)
    made = [
        Answer(
            time=begins + place,
            seconds=float(0.01 + length * chance.gamma(20, 0.0005)),
            max_tokens=64,
            prompt_tokens=int(chance.integers(1, 200)),
            completion_tokens=int(length),
            finish_reason="length" if length == 64 else "stop",
            repetition=round(float(chance.beta(1, 12)), 4) if length > 3 else None,
            entropy=round(float(chance.normal(2.0, 0.4)), 4),
            odd=float(chance.random() < 0.02) / 50,
        )
        for place, length in enumerate(lengths)
    ]
    return [replace(answer, **more) for answer in made] if more else made


def broken(answer):
    """The same request, failed by the server's fault."""
    return Answer(answer.time, answer.seconds, answer.max_tokens, 500, "RuntimeError")


def every(step, made, change):
    """The same answers, every `step`th changed."""
    return [change(answer) if place % step == 0 else answer for place, answer in enumerate(made)]
