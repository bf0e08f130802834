"""A model's process that computes wrongly, as with a faulty processor or library: the least likely token comes first.

`canary-wrong` plants this file as `sitecustomize.py`, which Python imports when it starts. Only what serves a model by ONNX
Runtime is changed, and only while the file `wrong` is beside it: the golden prompts before that are answered correctly. `done`
beside it says that an answer was wrong.
"""

import sys
from pathlib import Path
from typing import Any

WRONG, DONE = (Path(__file__).with_name(name) for name in ("wrong", "done"))


def plant() -> None:
    from tasks.jobs.serving.decoder import Decoder

    right = Decoder._run

    def wrong(decoder: Decoder, *args: Any, **kwargs: Any) -> Any:
        logits = right(decoder, *args, **kwargs)
        if not WRONG.exists():
            return logits
        DONE.touch()
        return -logits

    Decoder._run = wrong  # type: ignore[assignment, method-assign]


if "tasks.jobs.serving.model_child" in sys.orig_argv:
    plant()
