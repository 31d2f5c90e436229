"""Reads what matters from compiled HLO text and from the compiler's messages."""

import dataclasses
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf" ({'|'.join(KINDS)})(?:-start)?\(")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*condition=%([\w.\-]+), body=%([\w.\-]+)")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_LESS = re.compile(r"ROOT .* compare\(\S+, %([\w.\-]+)\), direction=LT")


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Collectives of one kind: operations in the program, how many of them stand in loops, and runs
    per step (each operation times the trip counts of the loops around it)."""

    ops: int
    in_loops: int
    runs: int


def collectives(text: str) -> dict[str, Collectives]:
    """Counts collectives by kind in compiled HLO text.

    An asynchronous collective that the compiler spreads over several fusions keeps its channel id
    and is counted once. A loop whose trip count cannot be read counts as one run.
    """
    computations, entry = _computations(text)
    found: dict[tuple[str, str], tuple[int, ...]] = {}

    def visit(name: str, loops: tuple[int, ...]) -> None:
        for number, line in enumerate(computations.get(name, ())):
            if op := _COLLECTIVE.search(line):
                channel = _CHANNEL.search(line)
                found[op[1], channel[1] if channel else f"{name}:{number}"] = loops
            if loop := _WHILE.search(line):
                trips = _trip_count(line, computations.get(loop[1], []))
                visit(loop[2], (*loops, trips))
            for called in _called(line):
                visit(called, loops)

    visit(entry, ())
    result = {}
    for kind in KINDS:
        nests = [loops for (k, _), loops in found.items() if k == kind]
        if nests:
            runs = sum(_product(loops) for loops in nests)
            result[kind] = Collectives(len(nests), sum(bool(loops) for loops in nests), runs)
    return result


def involuntary_rematerializations(stderr: str) -> list[str]:
    """The distinct operations XLA's partitioner could only reshard by replicating them whole."""
    lines = [x for x in stderr.splitlines() if "Involuntary full rematerialization" in x]
    named = []
    for line in lines:
        op = re.search(r"for HLO operation (%\S+ = \S+)", line)
        where = re.search(r'op_name="([^"]*)"', line)
        text = f"{op[1] if op else line[:120]} in {where[1] if where else 'an unnamed scope'}"
        if text not in named:
            named.append(text)
    return named


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """What the compiler needed against what one device has, as it printed them (e.g. 271.86G)."""

    needed: str
    available: str

    @property
    def ratio(self) -> float:
        """needed / available; 1 where the compiler did not say."""
        needed, available = _bytes(self.needed), _bytes(self.available)
        return needed / available if needed and available else 1.0


def out_of_memory(message: str) -> OutOfMemory | None:
    """Parses a compile-time out-of-memory error; None for any other error."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    match = re.search(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)", message)
    used = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) hbm", message)
    found = match or used
    return OutOfMemory(found[1], found[2]) if found else OutOfMemory("more", "its memory")


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Splits HLO text into the lines of each computation, and names the entry."""
    found: dict[str, list[str]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith(" "):
            current.append(line)
    return found, entry


def _bytes(text: str) -> float | None:
    match = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    return float(match[1]) * 1024 ** " KMGT".index(match[2] or " ") if match else None


def _called(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    names = [x.strip().lstrip("%") for x in branches[1].split(",")] if branches else []
    return names + _CALLED.findall(line)


def _trip_count(loop: str, condition: list[str]) -> int:
    """What XLA noted on the loop, or the bound of `i < bound` (every scan); 1 for other forms."""
    if known := _KNOWN.search(loop):
        return int(known[1])
    constants = dict(m.groups() for line in condition if (m := _CONSTANT.search(line)))
    bound = next((m[1] for line in condition if (m := _LESS.search(line))), None)
    return int(constants.get(bound, 1))


def _product(loops: tuple[int, ...]) -> int:
    total = 1
    for trips in loops:
        total *= trips
    return total
