"""A training by Megatron as evidence about machines: how it ended, what a GPU reached, and whether that can be.

Lines of iterations alone say "success" of a run that was killed while it wrote its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from tasks.common.names import Verdict
from tasks.formats.megatron_log import MegatronRun
from tasks.hardware.sku import Sku
from tasks.qualification.limits import cited
from tasks.qualification.measured import TrainingPoint
from tasks.qualification.verdicts import Reason

SOURCE = "Headway: a training counts when it came to its end"


def point_of(run: MegatronRun, hosts: tuple[str, ...]) -> TrainingPoint | None:
    """The training as the probe of our own job leaves it; None where it does not print its throughput."""
    if run.tflops is None:
        return None
    return TrainingPoint(
        nodes=hosts,
        ranks=run.world or 0,
        step_seconds=run.seconds,
        tflops_per_rank=run.tflops,
        convention="the run's own",
        engine=run.tool,
    )


def findings(run: MegatronRun, sku: Sku, hosts: tuple[str, ...]) -> tuple[Reason, ...]:
    """What keeps it from counting, and what it says is wrong."""
    results = [*_ended(run), *_figures(run, sku)]
    return tuple(reason.model_copy(update={"nodes": hosts}) for reason in results)


def _ended(run: MegatronRun) -> Iterator[Reason]:
    last = run.iterations[-1]
    reached = f"iteration {last.number} of {last.total}"
    if run.killed:
        while_saving = (run.complete or run.done) and not run.saved
        what = f"killed while it saved the checkpoint, after {reached}" if while_saving else f"killed at {reached}"
        yield _reason("end", "failed", what, "an end of its own", text=run.killed[0])
    elif run.saving:
        yield _reason("checkpoint", "unknown", f"begun after {reached}, and no word of its end", "saved")
    elif not (run.complete or run.done):
        yield _reason("end", "unknown", f"the log ends at {reached}", f"iteration {last.total}, or a word of the end")


def _figures(run: MegatronRun, sku: Sku) -> Iterator[Reason]:
    if run.seconds is None:
        output = run.unread[0] if run.unread else "no iteration has a time"
        yield _reason("step time", "unknown", output, "elapsed time per iteration")
    if run.lost:
        yield _reason("loss", "degraded", float(run.lost), "= 0 iterations whose loss is no number")
    ceiling = sku.specs.get("achievable_bf16_tflops") or sku.specs.get("peak_bf16_tflops")
    if run.tflops and ceiling and run.tflops > float(ceiling.value):
        result = _reason(
            "throughput", "unknown", run.tflops, f"<= {ceiling.value}, which no matmul exceeds", unit="TFLOP/s"
        )
        output = "another convention of FLOPs, other hardware, or numbers of 8 bits"
        yield result.model_copy(update={"source": cited(sku, str(ceiling.source)), "said": output})


def _reason(
    what: str, verdict: Verdict, measured: float | str, limit: str, *, text: str = "", unit: str = ""
) -> Reason:
    return Reason(
        node="",
        check=f"training {what}",
        measured=measured,
        unit=unit,
        limit=limit,
        source=SOURCE,
        verdict=verdict,
        said=text,
        remedy="Read the training's log.",
    )
