"""Runs the scalar instructions of a schedule to count how often each cycle is executed.

Loops, branches and predicates of a Mosaic kernel depend on scalars alone: grid indices, values in
scalar memory, and tables handed over by scalar prefetch. Running just those gives the exact control
flow, hence the exact number of cycles, for the mask the tables describe; vector data never matter.
An instruction this module does not know yields an unknown value; a branch on an unknown value is an
error, never a guess.
"""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_kernels.bench.schedule import Bundle, Segment

MAX_RUNS = 2_000_000  # straight runs between taken branches
_PREFETCHED = re.compile(r"#(allocation\d+) \[.*tag = 'prefetched SMEM operand (\d+)'")
_CORE = re.compile(r"#(allocation\d+) \[.*core index'")
_INSTRUCTION = re.compile(r"(?:(%[sp]\w+) = |%\d+ = )?([a-z]\w*)(\.[\w.]+)?\s*(.*)")
_PREDICATE = re.compile(r"\((!?)(%p\w+)(?:, (\S+))?\),?\s*")
_ADDRESS = re.compile(r"\[smem:\[([^\]]*)\]\]")

Value = int | bool | tuple[str, int] | None  # a tuple is an address; None is unknown


class UnknownBranch(ValueError):
    """Control flow depends on something this module cannot follow."""


def _signed(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << (b & 31),
    "sshrl": lambda a, b: (a % 2**32) >> (b & 31),
    "sshra": lambda a, b: a >> (b & 31),
    "por": lambda a, b: a or b,
    "pand": lambda a, b: a and b,
    "pnand": lambda a, b: not (a and b),
    "pxor": operator.xor,
}


def _arithmetic(op: str, suffix: str, args: Sequence[Value]) -> Value:
    """The value of one instruction without side effects."""
    if op in ("smov", "pmov", "int_to_ptr"):
        return args[0]
    if op == "scalar_select":
        return None if args[0] is None else args[1] if args[0] else args[2]
    if op == "scalar_lea" and isinstance(args[0], tuple) and isinstance(args[1], int):
        return (args[0][0], args[0][1] + args[1])
    if any(a is None or isinstance(a, tuple) for a in args):
        return None
    if op == "pneg":
        return not args[0]
    unsigned = ".u32" in suffix
    if op in ("smin", "smax"):
        key = (lambda x: x % 2**32) if unsigned else None
        return (min if op == "smin" else max)(*args, key=key)
    if op == "scmp":
        a, b = (x % 2**32 for x in args) if unsigned else args
        return getattr(operator, suffix.split(".")[1])(a, b)
    if op not in _ARITHMETIC:
        return None
    value = _ARITHMETIC[op](*args)
    return bool(value) if op[0] == "p" else _signed(value)


class _Machine:
    """Scalar registers by name, and scalar memory by (allocation, word)."""

    def __init__(self, memory: dict[tuple[str, int], int]) -> None:
        self.names: dict[str, Value] = {}
        self.written: dict[str, int] = {}  # when, in writes
        self.memory: dict[tuple[str, int], Value] = dict(memory)
        self.tables = frozenset(memory)
        self.clock = 0

    def read(self, token: str) -> Value:
        if token.startswith("%"):
            return self.names.get(token)
        if token.startswith("[#"):
            return (token[2:-1], 0)
        try:
            return _signed(int(token.lstrip("$"), 0))
        except ValueError:
            return None

    def write(self, name: str, value: Value) -> None:
        self.names[name] = value
        self.clock += 1
        self.written[name] = self.clock

    def phi(self, operands: list[str]) -> Value:
        """What the way that was taken wrote last. Physical registers do not tell: a load may land
        after a later instruction has used its register."""
        return self.read(max(operands, key=lambda name: self.written.get(name, 0)))

    def address(self, text: str) -> tuple[str, int] | None:
        """Of "#allocation3 + %s1_s0" and the like."""
        base, offset = None, 0
        for part in text.split(" + "):
            value = (part[1:], 0) if part.startswith("#") else self.read(part)
            if isinstance(value, tuple):
                base, offset = value[0], offset + value[1]
            elif value is None:
                return None
            else:
                offset += value
        return None if base is None else (base, offset)

    def store(self, address: str, value: Value) -> None:
        where = self.address(address)
        if where is None:
            raise UnknownBranch(f"A scalar is stored at [{address}], which is unknown.")
        # A table of one word arrives in a register, whose value is unknown, and is stored then.
        if value is not None or where not in self.tables:
            self.memory[where] = value

    def run(self, instruction: tuple[Any, ...]) -> int | None:
        """Runs one instruction; returns the target of a branch that is taken."""
        name, op, suffix, predicate, address, args = instruction
        if predicate:
            holds = self.read(predicate[1])
            holds = holds if holds is None or not predicate[0] else not holds
            if op == "sbr":
                if holds is None:
                    raise UnknownBranch(
                        f"A branch depends on {predicate[1]}, whose value is unknown; hand the "
                        "tables of scalar prefetch to this reader."
                    )
                return args if holds else None
            if holds is None:  # perhaps: then the value is unknown
                if op == "sst":
                    self.store(address, None)
                elif name:
                    self.write(name, None)
                return None
            if not holds:
                if predicate[2] and name:
                    self.write(name, self.read(predicate[2]))
                return None
        if op == "sbr":
            return args
        if op == "sst":
            self.store(address, self.read(args[0]))
        elif op == "sld":
            self.write(name, self.memory.get(self.address(address)))
        elif name:
            self.write(name, _arithmetic(op, suffix, [self.read(a) for a in args]))
        return None


def _decode(bundle: Bundle) -> list[tuple[Any, ...]]:
    """The scalar instructions of a bundle; phis first, they stand for what came before it."""
    decoded = []
    for text in bundle.text.rstrip(" }").split(";;"):
        match = _INSTRUCTION.match(text.strip())
        if not match or not (match[1] or match[2] in ("sbr", "sst")):
            continue
        name, op, suffix, rest = match.groups()
        predicate = _PREDICATE.search(rest)
        rest = _PREDICATE.sub("", rest)
        address = _ADDRESS.search(rest)
        rest = _ADDRESS.sub("", rest)
        args: Any = [t.strip() for t in re.sub(r"\[resolvable:\S+\]", "", rest).split(",")]
        if op == "sbr":
            args = bundle.target
        decoded.append(
            (name, op, suffix or "", predicate and predicate.groups(), address and address[1], args)
        )
    return sorted(decoded, key=lambda i: i[1] not in ("sphi", "pphi"))


def count(
    bundles: Sequence[Bundle], memory: dict[tuple[str, int], int], delay_slots: int
) -> np.ndarray:
    """Runs a kernel.

    Args:
      bundles: its schedule.
      memory: words of scalar memory it finds, see `scalar_memory`.
      delay_slots: bundles that still run after a branch.

    Returns:
      (number of bundles,) int64: how often each is executed.

    Raises:
      UnknownBranch: a branch depends on an unknown value, or the kernel does not end.
    """
    program = [(n, _decode(b)) for n, b in enumerate(bundles)]
    program = [(n, instructions) for n, instructions in program if instructions]
    entry = np.searchsorted([n for n, _ in program], np.arange(len(bundles) + 1)).tolist()
    machine, runs = _Machine(memory), np.zeros(len(bundles) + 1, np.int64)
    position = 0
    for _ in range(MAX_RUNS):
        start, stop, target = position, len(bundles), len(bundles)
        for number, instructions in program[entry[start] :]:
            if number >= stop:
                break
            phis = [i for i in instructions if i[1] in ("sphi", "pphi")]
            for i, value in [(i, machine.phi(i[-1])) for i in phis]:
                machine.write(i[0], value)
            for instruction in instructions[len(phis) :]:
                taken = machine.run(instruction)
                if taken is not None and target == len(bundles):
                    target, stop = taken, number + delay_slots + 1
        runs[start] += 1
        runs[min(stop, len(bundles))] -= 1
        if target >= len(bundles):
            return np.cumsum(runs[:-1])
        position = target
    raise UnknownBranch(f"The kernel does not end within {MAX_RUNS} branches.")


def segment_runs(counts: np.ndarray, cut: Sequence[Segment]) -> list[int]:
    """How often each segment is run; raises UnknownBranch if one is not run as a whole."""
    runs = []
    for s in cut:
        first, *rest = set(counts[s.start : s.stop].tolist())
        if rest:
            raise UnknownBranch(
                f"Cycles {s.start} to {s.stop} are not run equally often, so they are no segment."
            )
        runs.append(first)
    return runs


def scalar_memory(
    allocations: str, tables: Sequence[np.ndarray], core: int = 0
) -> dict[tuple[str, int], int]:
    """Words of scalar memory at the start: the core's index, and the tables.

    Args:
      allocations: the dump `pre-finalize-registers-and-allocations`.
      tables: int32 or int8 arrays, in order of prefetch.
    """
    memory = {(name, 0): core for name in _CORE.findall(allocations)}
    for name, operand in _PREFETCHED.findall(allocations):
        if int(operand) >= len(tables):
            continue  # unknown, which matters only if a branch depends on it
        memory |= {(name, i): int(w) for i, w in enumerate(_words(tables[int(operand)]))}
    return memory


def _words(table: np.ndarray) -> np.ndarray:
    """A table as it lies in scalar memory: rows padded to 128 words, four int8 rows to a word."""
    table = np.asarray(table)
    if table.ndim < 2 and table.dtype.itemsize == 4:
        return table.ravel()
    table = np.atleast_2d(table)
    packing = 4 // table.dtype.itemsize
    rows, columns = table.shape[-2:]
    flat = table.reshape(-1, rows, columns).astype(np.int64)
    flat = np.pad(flat, ((0, 0), (0, -rows % packing), (0, -columns % 128)))
    flat = flat.reshape(len(flat), -1, packing, flat.shape[-1] // 128, 128)
    byte = 8 * np.arange(packing).reshape(1, 1, -1, 1, 1)
    words = ((flat % 256 if packing == 4 else flat) << byte).sum(axis=2) if packing > 1 else flat
    return ((words.reshape(-1) + 2**31) % 2**32 - 2**31).astype(np.int64)
