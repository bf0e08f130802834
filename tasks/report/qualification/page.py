"""The page of a qualification: one self-contained HTML text, light and dark, without script. The verdict stands first.

Pairs are pairs.py's, rates, versions and what is missing rates.py's. Elements are
tasks/report/markup.py's, the frame that of a run's report.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Literal

from tasks.common.names import COLLECTIVES, Verdict
from tasks.hardware.sku import BusBandwidth
from tasks.qualification.limits import bandwidths
from tasks.qualification.measured import Row, Sweep, TrainingPoint
from tasks.qualification.sweeps import Merged, merged
from tasks.qualification.verdicts import NodeVerdict, Reason
from tasks.report.data import duration, number, percent
from tasks.report.markup import Html, figure, folded, grid, join, tag
from tasks.report.qualification.charts import Band, Line, chart, size_text, steps
from tasks.report.qualification.data import SIGN, STYLES, Found, by_number, count, finite, four, until
from tasks.report.qualification.pairs import pairs
from tasks.report.qualification.rates import missing, rates, versions, words
from tasks.report.revalidation.markup import said

# Of a qualification's page: the bandwidth of every collective against the hardware's limits. Pairs: pairs.py.


SCOPES = {"all": "All machines together", "node": "Within a machine", "pair": "Between two machines"}
SWEEPS_WITH_ROWS = 12
LEGEND = {
    "out": "out of place",
    "in": "in place",
    "band": "from the least to the largest of all",
    "slow": "the slowest, where it is blamed",
    "norm": "what sound hardware reaches",
    "warn": "degraded below",
    "fail": "failed below",
}


def bandwidth(result: Found) -> Html:
    """A chart a collective and scope, then the rows of the sweeps over all machines."""
    drawn, parts = _drawn(result), list[Html]()
    for scope, heading in SCOPES.items():
        if scope == "node" and parts and len(drawn["all", COLLECTIVES[0]][0].nodes) == 1:
            continue  # the same as all machines together
        figures = [_figure(result, drawn[scope, one]) for one in COLLECTIVES]
        if any(figures):
            parts.append(join(tag("h3", heading), tag("div", *figures, class_="figures")))
    whole = [sweep for sweep in result.measured.sweeps if sweep.scope == "all"]
    return join(_bandwidth_legend(), *parts, *map(_rows, whole[:SWEEPS_WITH_ROWS])) if parts else Html()


def _figure(result: Found, sweeps: Sequence[Merged]) -> Html:
    """Of one collective and scope: the median of all, where they lie, and the slowest one that is blamed."""
    if not sweeps:
        return Html()
    first = sweeps[0]
    limits = bandwidths(result.sku, first.collective, first.scope, len(first.nodes))
    until = max(point.bytes for sweep in sweeps for point in sweep.points)
    lines = [
        Line(kind, steps([(one.bytes, value) for one in limits if (value := getattr(one, kind))], until))
        for kind in ("norm", "warn", "fail")
    ]
    slow, middle = _slowest(result, sweeps), _middle(sweeps, "busbw")
    lines += [Line("slow", _bandwidth_curve(slow, "busbw"))] if slow else []
    lines += [Line("in", _middle(sweeps, "in_place")), Line("out", middle)]
    label = f"{first.collective}, {first.scope}: bus bandwidth in GB/s"
    drawn = chart(f"{first.collective}-{first.scope}", label, lines, _band(sweeps))
    return figure(drawn, first.collective, _said(sweeps, middle, limits, slow))


def _said(
    sweeps: Sequence[Merged], middle: Sequence[tuple[float, float]], limits: Sequence[BusBandwidth], slow: Merged | None
) -> str:
    """The largest message in numbers, for on a logarithm 5% are not seen."""
    parts = []
    if middle:
        of = "" if len(sweeps) == 1 else f"median of {len(sweeps):,}: "
        parts.append(f"{of}{number(four(middle[-1][1]))} GB/s at {size_text(middle[-1][0])}")
    if slow:
        parts.append(f"{', '.join(slow.nodes[:2])}: {number(four(_bandwidth_curve(slow, 'busbw')[-1][1]))}")
    if limits:
        last = max(limits, key=lambda limit: limit.bytes)
        entries = [f"{kind} {number(value)}" for kind in ("norm", "warn", "fail") if (value := getattr(last, kind))]
        parts.append(f"from {size_text(last.bytes)}: {', '.join(entries)}")
    if used := sorted({name for sweep in sweeps for name in sweep.transport}):
        parts.append(f"by {', '.join(used[:4])}")
    wrong = sum(sweep.wrong for sweep in sweeps)
    return "; ".join([*parts, f"{wrong:,} WRONG elements"] if wrong else parts)


def _bandwidth_legend() -> Html:
    items = (
        f'<li><svg class="key" width="26" height="14" aria-hidden="true">{_key(style)}</svg>{text}</li>'
        for style, text in LEGEND.items()
    )
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


def _key(style: str) -> str:
    shape = '<rect y="2" width="26" height="10" class="band"/>' if style == "band" else ""
    return shape or f'<path class="line {style}" d="M0,7H26"/>'


def _drawn(result: Found) -> dict[tuple[str, str], list[Merged]]:
    """Best rounds by scope and collective. Of runs over several numbers of machines, the one over those that are used."""
    kept: dict[tuple[str, str], list[Merged]] = defaultdict(list)
    for sweep in merged(result.measured.sweeps):
        if sweep.points:
            kept[sweep.scope, sweep.collective].append(sweep)
    used = set(result.usable)
    for key, several in kept.items():
        if key[0] == "all":
            kept[key] = [max(several, key=lambda sweep: (set(sweep.nodes) <= used, len(sweep.nodes)))]
    return kept


def _slowest(result: Found, sweeps: Sequence[Merged]) -> Merged | None:
    """Of several sweeps the one with the least at the end, where the verdict blames a machine of it."""
    suspects = [sweep for sweep in sweeps if result.suspects & set(sweep.nodes) and _bandwidth_curve(sweep, "busbw")]
    return (
        min(suspects, key=lambda sweep: _bandwidth_curve(sweep, "busbw")[-1][1])
        if suspects and len(sweeps) > 1
        else None
    )


def _bandwidth_curve(sweep: Merged, which: Literal["busbw", "in_place"]) -> tuple[tuple[float, float], ...]:
    points = ((point.bytes, finite(getattr(point, which))) for point in sweep.points)
    return tuple((float(size), value) for size, value in points if value is not None)


def _by_size(sweeps: Sequence[Merged], which: Literal["busbw", "in_place"]) -> dict[float, list[float]]:
    result: dict[float, list[float]] = defaultdict(list)
    for sweep in sweeps:
        for size, value in _bandwidth_curve(sweep, which):
            result[size].append(value)
    return dict(sorted(result.items()))


def _middle(sweeps: Sequence[Merged], which: Literal["busbw", "in_place"]) -> tuple[tuple[float, float], ...]:
    return tuple((size, statistics.median(all_)) for size, all_ in _by_size(sweeps, which).items())


def _band(sweeps: Sequence[Merged]) -> Band | None:
    if len(sweeps) < 2:
        return None
    return Band(tuple((size, min(all_), max(all_)) for size, all_ in _by_size(sweeps, "busbw").items()))


def _rows(sweep: Sweep) -> Html:
    """A sweep as nccl-tests print it."""
    heads = (
        "Size",
        "Time, µs",
        "algbw",
        "busbw",
        "Wrong",
        "Time in place",
        "algbw in place",
        "busbw in place",
        "Wrong in place",
    )
    rows = [_bandwidth_row(row) for row in sorted(sweep.rows, key=lambda row: -row.bytes)]
    again = f", measured again ({sweep.round})" if sweep.round else ""
    who = f"{count(len(sweep.nodes), 'machine')}, {count(sweep.ranks, 'rank')}"
    how = f"{sweep.collective}: {who}, {sweep.backend}, {sweep.tool}{again}"
    return folded(how, grid(heads, rows, class_="numbers"))


def _bandwidth_row(row: Row) -> tuple[str, ...]:
    out = (row.microseconds, row.algbw, row.busbw, row.wrong)
    inside = (row.microseconds_in_place, row.algbw_in_place, row.busbw_in_place, row.wrong_in_place)
    return (size_text(row.bytes), *map(_cell, (*out, *inside)))


def _cell(value: float | None) -> str:
    return "N/A" if finite(value) is None else number(four(float(value or 0)))


# Of a qualification's page: which machines are used, which are left out, and what was done about them, or can be.


NAMES_SHOWN = 24


def acts(result: Found) -> Html:
    """Sentences, and the requests that nobody has sent yet; nothing where nothing is known of it."""
    actions = tag("ul", *(tag("li", one) for one in sentences(result)))
    asked = tag("ul", *(tag("li", *_request(one)) for one in result.requests), class_="requests")
    title = f"{count(len(result.requests), 'request')} to Azure that somebody may send; Headway sends none"
    return join(tag("h3", "What follows"), actions, folded(title, asked)) if actions or asked else Html()


def sentences(result: Found) -> list[str]:
    """What was done with the machines."""
    entries = []
    if result.usable and result.open:
        entries.append(f"Jobs run on {count(len(result.usable), 'machine')}: {named(result.usable)}.")
    if result.excluded:
        entries.append(f"Left out of the jobs to come: {named(result.excluded)}.")
    if done := [node for node, done, _ in result.drained if done]:
        entries.append(f"Drained, until headway qualify --resume puts them back: {named(done)}.")
    entries += [f"{node} was not drained: {why}." for node, done, why in result.drained if not done]
    return entries


def named(names: tuple[str, ...] | list[str] | Mapping[str, str]) -> str:
    """The first of them, and how many more."""
    known = sorted(names, key=by_number)
    more = f" and {len(known) - NAMES_SHOWN:,} more" if len(known) > NAMES_SHOWN else ""
    return ", ".join(known[:NAMES_SHOWN]) + more


def _request(one: Mapping[str, Any]) -> tuple[Html, ...]:
    body = one.get("body")
    return (
        tag("strong", f"{one.get('node', '')}: {one.get('what', '')} "),
        tag("code", f"{one.get('method', '')} {one.get('url', '')}"),
        tag("pre", json.dumps(body, indent=1)) if body else Html(),
    )


# Of a qualification's page: the training probe, as a scaling curve with its efficiency and the shares of a step.


SHARES = {"compute": "compute_share", "communication": "communication_share", "data": "data_share"}
HEADS = ("Machines", "Ranks", "Step, s", "TFLOP/s a rank", "Tokens a second", "Efficiency", "Share of a step")


def training(result: Found) -> Html:
    """A curve where there are several sizes, a row a size."""
    points = sorted(
        (point for point in result.measured.training if finite(point.tflops_per_rank)), key=lambda point: point.ranks
    )
    if not points:
        return Html()
    first = points[0]
    note = (
        f"FLOPs as {first.convention or 'nobody said'} counts them; {first.engine}. Efficiency is against the smallest."
    )
    table = grid(HEADS, [_row(point, first) for point in points], class_="training")
    return join(tag("div", _curve(points), class_="figures"), tag("p", note, class_="note"), _legend(), table)


def efficiency(point: TrainingPoint, first: TrainingPoint) -> float:
    """Rate a rank by that of the smallest size."""
    return (point.tflops_per_rank or 0.0) / (first.tflops_per_rank or 1.0)


def _curve(points: Sequence[TrainingPoint]) -> Html:
    if len(points) < 2:
        return Html()
    first, last = points[0], points[-1]
    total = [(len(point.nodes), (point.tflops_per_rank or 0.0) * point.ranks) for point in points]
    ideal = [(len(point.nodes), (first.tflops_per_rank or 0.0) * point.ranks) for point in points]
    lines = [
        Line("ideal", tuple((float(nodes), rate) for nodes, rate in ideal)),
        Line("out", tuple((float(nodes), rate) for nodes, rate in total), dots=True),
    ]
    kept = f"{percent(efficiency(last, first))} at {len(last.nodes):,}"
    caption = f"TFLOP/s of all ranks by machines; dashed: as many times the first. {kept}"
    drawn = chart("scaling", f"Training rate on up to {len(last.nodes):,} machines", lines, bytes_=False)
    return figure(drawn, "Scaling", caption)


def _row(point: TrainingPoint, first: TrainingPoint) -> tuple[str, ...]:
    step = finite(point.step_seconds)
    return (
        number(len(point.nodes)),
        number(point.ranks),
        number(four(step)) if step else "N/A",
        number(four(point.tflops_per_rank or 0.0)),
        number(round(point.tokens_per_step / step)) if step else "N/A",
        percent(efficiency(point, first)),
        _shares(point),
    )


def _shares(point: TrainingPoint) -> Html:
    """A bar of the three parts; nothing where they were not measured."""
    payload = {name: finite(getattr(point, field)) for name, field in SHARES.items()}
    known = {name: value for name, value in payload.items() if value is not None}
    if not known:
        return Html()
    left, shapes = 0.0, []
    for name, value in known.items():
        wide = 100 * min(max(value, 0.0), 1.0)
        shapes.append(f'<rect x="{left:.2f}%" width="{wide:.2f}%" height="14" class="{name}"/>')
        left += wide
    bar = Html(f'<svg class="shares" width="100%" height="14" aria-hidden="true">{"".join(shapes)}</svg>')
    return join(bar, tag("small", ", ".join(f"{name} {percent(value)}" for name, value in known.items())))


def _legend() -> Html:
    head = '<svg class="shares key" width="26" height="14" aria-hidden="true"><rect width="26" height="14"'
    items = (f'<li>{head} class="{name}"/></svg>{name}</li>' for name in SHARES)
    return Html(f'<ul class="legend">{"".join(items)}</ul>')


FOLDER = Path(__file__).parents[1]
SENTENCES_OPEN = 12
TILES_FROM = 9
TILE, TILES_A_ROW = 20, 48
MEANS: dict[Verdict, str] = {
    "healthy": "The machines that are used showed what their hardware must show. The gate is open.",
    "degraded": "The machines that are used are slower than they should be, and above what is asked at least. The gate is open.",
    "failed": "The machines that are left do not show what they must. The gate is closed: nothing is trained on them.",
    "unknown": "Something that must be known is not known. Silence is not health: the gate is closed.",
}


def qualification_page(result: Found) -> str:
    """The page as one HTML document, UTF-8; equal values give equal text."""
    sections = {
        "Machines": _machines(result),
        "Bandwidth": bandwidth(result),
        "Pairs": pairs(result),
        "Rates": rates(result, storage=False),
        "Training": training(result),
        "Storage": rates(result, storage=True),
        "Findings": _findings(result),
        "Versions": versions(result),
        "Not measured": missing(result),
        "Hardware": _hardware(result),
    }
    shown = {heading: body for heading, body in sections.items() if body}
    ids = {heading: heading.lower().replace(" ", "-") for heading in shown}
    links = (tag("a", heading, href=f"#{ids[heading]}") for heading in shown)
    bodies = (tag("section", tag("h2", heading), body, id=ids[heading]) for heading, body in shown.items())
    style = "".join(
        (FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "qualification/qualification.css")
    )
    return Template((FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        style=style,
        title=escape(f"Qualification of {result.name or 'a cluster'}"),
        status=badge(result.verdict.verdict),
        about=escape(_about(result)),
        links=join(*links),
        main=join(_verdict(result), *bodies),
    )


def badge(verdict: Verdict) -> Html:
    """A verdict as a word with a sign and a colour."""
    sign = tag("span", SIGN[verdict], aria_hidden="true")
    return tag("span", sign, f" {verdict}", class_=f"badge {STYLES[verdict]}")


def _about(result: Found) -> str:
    measured = result.measured
    entries = (
        f"judged as {result.sku.name}",
        f"{result.answered:,} of {count(measured.expected_nodes, 'machine')} answered",
        measured.seconds and f"{duration(measured.seconds)} of measuring",
        measured.seconds and f"{measured.seconds * measured.expected_nodes / 3600:.3g} machine hours",
        result.expires and f"holds until {until(result.expires)}",
    )
    return " · ".join(part for part in entries if part)


def _verdict(result: Found) -> Html:
    verdict = result.verdict.verdict
    head = tag("h2", tag("span", SIGN[verdict], aria_hidden="true"), f" {verdict}")
    lead = join(tag("p", MEANS[verdict], class_="lead"), tag("p", _counts(result), class_="lead"))
    lost = f"{count(result.absent, 'machine')} left no word at all." if result.absent else ""
    holds = [reason for reason in result.reasons if result.holds(reason)]
    others = [reason for reason in result.reasons if not result.holds(reason)]
    out = _part("Of machines that are left out", _sentences(result, others))
    body = (head, lead, tag("p", lost), _sentences(result, holds), acts(result), out)
    return tag("div", *body, class_=f"verdict {STYLES[verdict]}", role="status")


def _sentences(result: Found, reasons: Sequence[Reason]) -> Html:
    """The first of them, the others folded."""
    entries = [tag("li", *_sentence(result, reason)) for reason in reasons]
    more = tag("ul", *entries[SENTENCES_OPEN:])
    return join(tag("ul", *entries[:SENTENCES_OPEN]), folded(f"{len(entries) - SENTENCES_OPEN:,} more", more))


def _part(heading: str, body: Html) -> Html:
    return join(tag("h3", heading), body) if body else Html()


def _counts(result: Found) -> Html:
    """How many machines are what."""
    by = Counter(node.verdict for node in result.nodes)
    by["unknown"] += result.absent
    return join(
        *(tag("span", badge(verdict), f" {by[verdict]:,}", class_="count") for verdict in STYLES if by[verdict])
    )


def _sentence(result: Found, reason: Reason) -> tuple[Html, ...]:
    """Machine, check, measured, limit, source, and what to do."""
    who = " ".join(part for part in (reason.node or "the cluster", reason.where) if part)
    unit = f" {reason.unit}" if reason.unit else ""
    if reason.measured is None:
        shown, unit = reason.said or "nothing was measured", ""
    else:
        shown = number(float(f"{reason.measured:.4g}")) if isinstance(reason.measured, float) else reason.measured
    head = tag("span", f"{SIGN[reason.verdict]} {reason.verdict}", class_=f"word {STYLES[reason.verdict]}")
    sentence = tag(
        "span", tag("strong", who), f": {reason.check} ", tag("strong", f"{shown}{unit}"), f", limit {reason.limit}"
    )
    evidence = reason.said if reason.measured is not None else ""
    below = ". ".join(
        part.rstrip(".") for part in (f"({result.source(reason.source)})", evidence, reason.remedy) if part
    )
    return (head, Html(" "), sentence, Html(" "), tag("small", said(below)))


def _machines(result: Found) -> Html:
    """Worst first; what is healthy is folded where there are many."""
    heads = ("Machine", "Verdict", "Host", "Ranks", "Why")
    hosts = {report.node: report.host for report in result.measured.ranks}
    ranks = Counter(report.node for report in result.measured.ranks)
    rows = {node.name: _machine(result, node, hosts.get(node.name, ""), ranks[node.name]) for node in result.nodes}
    entries = [rows[node.name] for node in result.nodes if node.verdict != "healthy"]
    sound = [rows[node.name] for node in result.nodes if node.verdict == "healthy"]
    tiles = _tiles(result.nodes) if len(result.nodes) >= TILES_FROM else Html()
    if len(result.nodes) < TILES_FROM:
        return grid(heads, [*entries, *sound], class_="machines")
    healthy = folded(count(len(sound), "healthy machine"), grid(heads, sound, class_="machines"))
    return join(tiles, grid(heads, entries, class_="machines"), healthy)


def _machine(result: Found, node: NodeVerdict, host: str, ranks: int) -> tuple[str, ...]:
    why = tag("ul", *(tag("li", f"{reason.where} {reason.check}".strip()) for reason in node.reasons[:4]))
    more = tag("small", f"and {len(node.reasons) - 4} more") if len(node.reasons) > 4 else Html()
    of = f"{ranks} of {result.measured.ranks_per_node}" if result.measured.ranks_per_node else str(ranks)
    return (node.name, badge(node.verdict), host if host != node.name else "", of, join(why, more))


def _tiles(nodes: Sequence[NodeVerdict]) -> Html:
    """A square a machine, in the order of names; a sign in those that are not healthy."""
    shapes = []
    for place, node in enumerate(sorted(nodes, key=lambda node: by_number(node.name))):
        x, y = TILE * (place % TILES_A_ROW), TILE * (place // TILES_A_ROW)
        sign = SIGN[node.verdict] if node.verdict != "healthy" else ""
        text = f'<text x="{x + TILE / 2 - 1}" y="{y + 14}" text-anchor="middle">{sign}</text>' if sign else ""
        title = f"<title>{escape(node.name)}: {node.verdict}</title>"
        square = f'<rect x="{x}" y="{y}" width="{TILE - 2}" height="{TILE - 2}" rx="3"/>'
        shapes.append(f'<g class="{STYLES[node.verdict]}">{title}{square}{text}</g>')
    wide, rows = min(len(nodes), TILES_A_ROW) * TILE, -(-len(nodes) // TILES_A_ROW)
    size = f'viewBox="0 0 {wide} {rows * TILE}" style="max-width:{wide}px"'
    head = f'<svg class="tiles" {size} role="img" aria-label="Verdicts of machines">'
    return Html(f"{head}{''.join(shapes)}</svg>")


def _findings(result: Found) -> Html:
    """What machines say of themselves: an Xid, a failed check."""
    rows = [
        (
            report.node,
            probe.check,
            probe.where,
            tag(
                "span",
                "✕ fail" if probe.finding == "fail" else "■ warn",
                class_="bad" if probe.finding == "fail" else "warn",
            ),
            join(tag("span", "" if probe.measured is None else number(probe.measured)), tag("small", probe.said)),
        )
        for report, probe in result.probes()
        if probe.finding
    ]
    messages = folded("What machines said in words", words(result))
    return join(grid(("Machine", "Check", "Where", "Finding", "Said"), rows), messages)


def _hardware(result: Found) -> Html:
    """What everything was held against, and where its numbers are from."""
    rows = [
        (name, tag("span", source.what), str(source.date))
        for name, source in result.sku.sources.items()
        if name in result.sku.named_sources
    ]
    names = {"name": result.sku.name, "family": result.sku.family, "digest": result.verdict.sku_digest[:12]}
    listed = [join(tag("dt", name), tag("dd", tag("code", value))) for name, value in names.items() if value]
    return join(tag("dl", *listed), grid(("Source", "What", "Read"), rows))
