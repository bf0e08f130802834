"""The inner side of the sandbox of tasks/jobs/evaluation/code_suite.py: limits itself, runs foreign code, tells what came of it.

Standard library only, and a file by itself: it is run by path, with neither our packages nor anybody else's in reach.
"""

from __future__ import annotations

import doctest
import json
import math
import os
import resource
import sys
import time
from typing import Any


def main() -> int:
    """Read the order from standard input, run it, and leave the verdict on standard output."""
    order = json.load(sys.stdin)
    os.close(0)
    os.closerange(2, 4096)
    os.environ.clear()
    # No file may grow, no further process may be, and CPU and memory are bounded.
    cpu = order["cpu_seconds"] + math.ceil(time.process_time())
    limits = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (order["memory"], order["memory"]),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_NPROC: (1, 1),
        resource.RLIMIT_NOFILE: (32, 32),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    for kind, values in limits.items():
        resource.setrlimit(kind, values)
    _tell({"ready": True})
    # Define what the code defines, then try each example of the prompt's own docstring.
    examples = doctest.DocTestParser().get_examples(order["examples"])
    names: dict[str, Any] = {"__name__": "completion"}
    try:
        exec(compile(order["code"], "completion", "exec"), names)
    except BaseException as error:  # noqa: BLE001 whatever foreign code raises is its failure
        verdict = {"attempted": 0, "failed": len(examples), "raised": type(error).__name__[:80]}
    else:
        test = doctest.DocTest(examples, names, "completion", None, None, None)
        result = doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None)
        verdict = {"attempted": result.attempted, "failed": result.failed}
    sys.stdout = sys.__stdout__
    _tell({"nonce": order["nonce"], **verdict})
    return 0


def _tell(output: dict[str, Any]) -> None:
    os.write(1, (json.dumps(output) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
