"""Reads the compiler's schedule of a Mosaic kernel: one bundle per cycle, cut into segments.

Text formats are those of libtpu 0.0.42 and 0.0.52 (`--xla_jf_dump_llo_text`):
`packed-bundles-post-ra` has one bundle per cycle, empty ones included;
`pre-delay_hlo-static-per-bundle-utilization` has the use of each unit in the same cycles.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:([A-Z]{2})\s*)?:\s*((?:>\s*)*)\{", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_TARGET = re.compile(r"target bundleno = (\d+)")
_VMEM = re.compile(r"space=vmem, size = (0x[0-9a-f]+|\d+)")


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One cycle. `label` is LB at the head of a loop's body, and "" at most bundles."""

    label: str
    depth: int  # loops around it
    text: str  # instructions without comments, separated by ";;"

    @property
    def target(self) -> int | None:
        """The bundle a branch in this one goes to."""
        match = _TARGET.search(self.text)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Utilization:
    """Slots used per cycle and unit, and how many the unit has."""

    capacity: dict[str, int]
    rows: list[tuple[int, ...]]

    def sums(self, start: int, stop: int) -> dict[str, int]:
        """Slots used in cycles [start, stop), by unit."""
        columns = zip(*self.rows[start:stop], strict=True)
        return dict(zip(self.capacity, map(sum, columns), strict=True))


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of cycles that nothing enters or leaves halfway (delay slots belong to it)."""

    start: int
    stop: int
    depth: int
    label: str
    vmatmul: int
    lane_reductions: int
    transposes: int
    exponentials: int
    units: dict[str, int]  # slots used, by unit
    branch: int | None  # where a branch at the end goes, None if there is none

    @property
    def cycles(self) -> int:
        return self.stop - self.start

    @property
    def spills(self) -> int:
        return self.units["VSTORE:SPILL"] + self.units["VLOAD:FILL"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What the compiler says of one kernel."""

    name: str
    segments: list[Segment]
    capacity: dict[str, int]  # slots per cycle, by unit
    vmem_bytes: int
    runs: list[list[int]]  # how often a core runs each segment, by core; empty if unknown
    why_unknown: str = ""

    def busy(self, segment: Segment, unit: str = "MATMUL") -> float:
        """Cycles the segment would take if only this unit limited it."""
        return segment.units[unit] / self.capacity[unit]

    def total(self, measure: Callable[[Segment], float]) -> float:
        """Sums a measure over every run of every segment, on all cores."""
        return sum(
            n * measure(x) for runs in self.runs for n, x in zip(runs, self.segments, strict=True)
        )


def parse_bundles(text: str) -> list[Bundle]:
    """Parses `packed-bundles-post-ra`.

    Raises:
      ValueError: bundles are not numbered 0, 1, 2, ...
    """
    heads = list(_BUNDLE.finditer(text))
    ends = [h.start() for h in heads[1:]] + [len(text)]
    bundles = []
    for number, (head, end) in enumerate(zip(heads, ends, strict=True)):
        if int(head[1], 16) != number:
            raise ValueError(
                f"The dump numbers bundle {number} as {head[1]}; it is cut off, or of a libtpu "
                "whose format this reader does not know (0.0.42 and 0.0.52 work)."
            )
        body = _COMMENT.sub("", text[head.end() : end])
        bundles.append(Bundle(head[2] or "", head[3].count(">"), " ".join(body.split())))
    return bundles


def parse_utilization(text: str) -> Utilization:
    """Parses `pre-delay_hlo-static-per-bundle-utilization`."""
    header, body = text.split("== UTILIZATION:")
    _, names, counts = header.strip().splitlines()[:3]
    # libtpu 0.0.42 calls MXU what later ones call MATMUL, and does not count pushes.
    units = ["MATMUL" if n.strip() == "MXU" else n.strip() for n in names.split(",")]
    capacity = dict(zip(units, map(int, counts.split()), strict=True))
    rows = [tuple(map(int, line.split())) for line in body.strip().splitlines()]
    return Utilization(capacity, rows)


def parse_vmem(text: str) -> int:
    """Sums the VMEM allocations of `pre-finalize-registers-and-allocations`, in bytes."""
    return sum(int(size, 0) for size in _VMEM.findall(text))


def cuts(bundles: Sequence[Bundle], delay_slots: int) -> list[int]:
    """Where segments begin: at branch targets, after a branch's delay slots, at loop bodies."""
    starts = {0}
    for number, bundle in enumerate(bundles):
        if bundle.target is not None:
            starts |= {bundle.target, number + delay_slots + 1}
        if bundle.label == "LB":
            starts.add(number)
    return sorted(s for s in starts if s < len(bundles))


def segments(bundles: Sequence[Bundle], use: Utilization, delay_slots: int) -> list[Segment]:
    """Cuts a kernel into segments; `delay_slots` bundles still run after a branch."""
    starts = cuts(bundles, delay_slots)
    found = []
    for start, stop in zip(starts, starts[1:] + [len(bundles)], strict=True):
        rows = bundles[start:stop]
        text = "\n".join(b.text for b in rows)
        found.append(
            Segment(
                start=start,
                stop=stop,
                depth=max(b.depth for b in rows),  # empty bundles carry no marks
                label=rows[0].label,
                vmatmul=len(re.findall(r"\bvmatmul", text)),
                lane_reductions=text.count(".xlane."),
                transposes=len(re.findall(r"\bvxpose", text)),
                exponentials=len(re.findall(r"\bv(?:exp2|pow2)", text)),
                units=use.sums(start, stop),
                branch=next((b.target for b in rows[::-1] if b.target is not None), None),
            )
        )
    return found
