"""The stages of `validate` and `preprocess` on the virtual clock: from rates, and from what the product's code took on names."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scale.clock import Machines, Stage, shared_out
from tasks.storage.manifest import THREADS

OF_A_DOCUMENT = {"ranks": 1, "mapped": 21, "launcher": 5}
"""Bytes that are held for a document of the whole corpus. Each machine: whether it equals an earlier one (duplicates.py). The
first one, in mapped files: what it repeats, how similarly, and its split (profile.py). The launcher: the rules that it breaks,
and whether it is set aside, on the held-out side, and named (judging.py)."""
PARTS = 536
"""Bytes of a unit's files for a document: its row, signature, hashes and bands."""


class Rates:
    """What a byte of a corpus takes, from two corpora of different sizes; see rates.py."""

    def __init__(self, corpora: Sequence[dict]) -> None:
        self.small, self.large = corpora
        self.document = self.large["bytes"] / self.large["documents"]
        """Bytes on disk."""
        self.tokens = self.large["steps"]["tokens"]["bytes"] / self.large["bytes"]
        """Bytes of tokens for one of the corpus."""

    def __call__(self, step: str, what: str = "cpu") -> float:
        before, after = self.small["steps"][step][what], self.large["steps"][step][what]
        return max(0.0, (after - before) / (self.large["bytes"] - self.small["bytes"]))

    @property
    def judging(self) -> dict[str, float]:
        """What a document takes to be judged: of one profile, and of the same with its rows many times."""
        once, often = (self.large["steps"][name] for name in ("judge", "judge often"))
        return {
            key: max(0.0, (often[key] - once[key]) / often["documents"]) for key in ("cpu", "wall", "read", "written")
        }


@dataclass(frozen=True)
class Corpus:
    """What the stages read; `units` are their bytes."""

    size: int
    documents: int
    units: Sequence[float]


@dataclass(frozen=True)
class Model:
    """A corpus on some machines. `names` has what each role of names.py took on its names and sizes."""

    corpus: Corpus
    rates: Rates
    names: dict[str, dict[str, float]]
    unit_memory: float
    """Bytes that a process holds while it measures a unit, beside what all share."""
    on: Machines
    shared: bool = True
    """Whether machines and launcher share a folder."""

    def validate(self) -> list[Stage]:
        size, documents, rank, first = self.corpus.size, self.corpus.documents, self.names["rank"], self.names["first"]
        linking = self.on.count if self.shared else 1
        work = rank["peak after receipts"] + self.on.cores * self.unit_memory
        link = rank["peak"] + self.on.cores * (rank["peak"] - rank["peak after receipts"])
        link += OF_A_DOCUMENT["ranks"] * documents
        parts = PARTS * documents
        stages = [
            *self._inputs(size),
            Stage("list, divide", "machines", rank["list"], memory=rank["peak after the list"]),
            self._units("measure", size, written=parts, memory=work),
        ]
        if not self.shared:
            stages.append(
                Stage("parts to the first", "first machine", self.on.moving(parts), read=parts, written=parts)
            )
        stages.append(
            Stage("receipts", "machines", rank["receipts"] + rank["linking"], memory=rank["peak after receipts"])
        )
        for step in ("exact", "near"):
            begin = rank[f"{step}: begin"] + (rank["near: links"] if step == "near" else 0)
            each, count = rank[f"{step}: a range"], int(rank[f"{step}: ranges"])
            seconds = begin + shared_out([each] * count, machines=linking, cores=self.on.cores)
            read = parts / 2
            stages.append(
                Stage(
                    "equal documents" if step == "exact" else "near duplicates",
                    "machines",
                    max(seconds, self.on.moving(read, by=linking)),
                    each * count + begin * linking,
                    read=read,
                    memory=link,
                )
            )
        own = first["receipts"] + first["summary"] + first["write"] + len(self.corpus.units) * first["rows of a unit"]
        merging = size * self.rates("merge") + own
        held = first["peak"] + OF_A_DOCUMENT["mapped"] * documents
        stages.append(Stage("merge", "first machine", merging, merging, parts / 4, 20 * documents, held))
        return [*stages, *self._judged()]

    def _judged(self) -> list[Stage]:
        size, documents, launcher = self.corpus.size, self.corpus.documents, self.names["launcher"]
        held = max(launcher["peak"], launcher["peak of the manifest"]) + OF_A_DOCUMENT["launcher"] * documents
        judging = documents * self.rates.judging["cpu"] + sum(
            launcher[f"shards {what}"] for what in ("read", "judged", "written")
        )
        marking = size * self.rates("mark")
        gone = size * self.rates("join", "written")
        joining = size * self.rates("join")
        manifest = sum(launcher[f"manifest{what}"] for what in ("", " written", " read"))
        stages = [
            Stage("judge", "launcher", judging, judging, 20 * documents, memory=held),
            Stage("mark", "launcher", marking, marking, 20 * documents, memory=held),
            Stage("check the input again", "launcher", max(self._hashed(size), self.on.moving(size)), read=size),
        ]
        if self.shared:
            # Whole shards are shared out; a process holds a part of one, and its marks.
            stages.append(self._units("divide", size, written=size, memory=self.on.cores * self.unit_memory))
            seconds = max(joining, self.on.moving(2 * gone))
            stages.append(Stage("join what was set aside", "first machine", seconds, joining, gone, gone))
            publishing = self._by_threads(size * self.rates("take over")) + manifest
            read, written = size, 0.0
        else:
            alone = size * self.rates("divide") + joining
            stages.append(Stage("divide", "launcher", max(alone, self.on.moving(2 * size)), alone, size, size, held))
            copied = size * max(0.0, self.rates("publish") - 2 * self.rates("verify"))  # hashed before and after
            publishing = copied + 2 * self._hashed(size) + manifest
            read, written = 3 * size, size
        seconds = max(publishing, self.on.moving(read + written))
        return [*stages, Stage("publish what stays", "launcher", seconds, publishing, read, written, held)]

    def preprocess(self) -> list[Stage]:
        size, tokens = self.corpus.size, self.corpus.size * self.rates.tokens
        known, writing = self.names["tokens"], self.on.count if self.shared else 1
        files = max(1, int(known["files"]))
        each = tokens * self.rates("write") / self.rates.tokens / files
        seconds = shared_out([each] * files, machines=writing, cores=1)
        publishing = self._by_threads(size * self.rates("publish tokens"))
        fixed = self.rates.large["steps"]["tokenizer"]["cpu"]
        memory = known["peak"] + self.on.cores * self.unit_memory
        stages = [
            *self._inputs(size),
            Stage("learn a tokenizer", "first machine", fixed, fixed),
            self._units("encode", size, written=tokens, memory=memory),
            Stage("receipts", "machines", known["list"] + known["receipts"], memory=known["peak"]),
            Stage(
                "write token files",
                "machines",
                max(seconds, self.on.moving(3 * tokens, by=writing)),
                each * files,
                2 * tokens,
                tokens,
                known["peak"],
            ),
        ]
        if not self.shared:
            stages.append(
                Stage("tokens to the launcher", "launcher", self.on.moving(2 * tokens), read=tokens, written=tokens)
            )
        moved = 0 if self.shared else tokens
        stages.append(
            Stage(
                "publish tokens",
                "launcher",
                max(publishing, self.on.moving(tokens + moved)),
                publishing,
                tokens,
                moved,
                known["peak"],
            )
        )
        return stages

    def _inputs(self, size: float) -> list[Stage]:
        """The launcher checks every byte where it shares the folder; elsewhere each machine brings all, and checks it."""
        checking, machines = size * self.rates("verify"), self.on.count
        if self.shared:
            seconds = max(self._hashed(size), self.on.moving(size))
            return [Stage("check the input", "launcher", seconds, checking, read=size)]
        seconds = max(checking, self.on.moving(size), size * machines / self.on.files)
        return [Stage("bring the input", "machines", seconds, checking * machines, read=size * machines)]

    def _hashed(self, size: float) -> float:
        return self._by_threads(size * self.rates("verify"))

    def _by_threads(self, seconds: float) -> float:
        """Of hashing many files (tasks/storage/manifest.py)."""
        return seconds / min(THREADS, self.on.cores)

    def _units(self, step: str, size: float, *, written: float, memory: float) -> Stage:
        each = [unit * self.rates(step) for unit in self.corpus.units]
        seconds = shared_out(each, machines=self.on.count, cores=self.on.cores)
        moving = self.on.moving(size + written, by=self.on.count)
        return Stage(step, "machines", max(seconds, moving), sum(each), size, written, memory)
