"""What a head costs, from the schedules of its kernels and how often their segments run."""

import dataclasses
from typing import Any

from pallas_kernels.bench.aot import Compiled, Report, StaticError
from pallas_kernels.bench.cases import KINDS, SPLASH, VARIANTS, splash_names
from pallas_kernels.bench.schedule import Schedule, Segment
from pallas_kernels.chips import CHIPS, Chip

PRODUCTS = {"forward": 2, "backward": 5}  # per pair of a query and a key, D multiply-adds each
OTHERS = ("splash", "dense")  # what own kernels are compared with
VECTOR = 1024  # float32 numbers of one vector instruction
SLOTS = ("VALU", "XLU", "VLOAD", "VSTORE", "EUP")


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel on one generation. Cycles and times are of one head with all its streams, on one
    core, in the static schedule; nothing was run on hardware."""

    kernel: str
    generation: str
    streams: int
    length: int
    dim: int
    dtype: str
    config: dict[str, Any]
    libtpu: str
    cycles: float
    mxu_cycles: float  # the floor: with the MXUs always busy
    loop_cycles: int  # one pass of the innermost loop
    outside_tiles: float  # share of cycles in segments without any product
    masked: float | None  # share of the products that is spent on pairs that nobody sees
    slots: dict[str, float]  # share of the slots used, in segments with products
    cores: int  # of the device, which the kernel keeps busy
    spills: int  # instructions, in the whole program
    vmem_bytes: int
    hbm_bytes: float
    microseconds: float  # of the schedule or of HBM traffic, whichever is longer
    hbm_microseconds: float
    tflops: float | None  # useful, per chip
    compile_seconds: float
    splash: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # by its mask
    device_microseconds: float = 0.0  # on all cores; of a backward, with its forward
    dense_microseconds: float | None = None  # the same of dense XLA, by XLA's own lower bound

    @property
    def best_splash(self) -> str | None:
        """The cheapest way to use splash attention, a key of `splash`."""
        return min(self.splash, key=lambda mask: self.splash[mask]["cycles"], default=None)

    def ratio(self, mask: str | None) -> float | None:
        """Of our cycles to those of splash attention."""
        return self.cycles / self.splash[mask]["cycles"] if mask in self.splash else None

    @property
    def dense_ratio(self) -> float | None:
        """Of dense XLA's time to ours."""
        return self.dense_microseconds and self.dense_microseconds / self.device_microseconds

    @property
    def mxu_share(self) -> float:
        return self.mxu_cycles / self.cycles


def in_loop(segment: Segment) -> int:
    """Cycles of a segment, not counting what is run once per call and not per step."""
    return segment.cycles if segment.depth else 0


def cycles_per_head(kernel: Schedule, heads: int) -> float:
    """Mean over the heads of a call; raises StaticError if it is unknown how often what runs."""
    if not kernel.runs:
        raise StaticError(f"The cycles of kernel {kernel.name!r} are unknown: {kernel.why_unknown}")
    return kernel.total(in_loop) / heads


def busy_cores(kernel: Schedule) -> int:
    """How many cores of the device run any product."""
    products = [x.vmatmul for x in kernel.segments]
    return sum(any(n * m for n, m in zip(r, products, strict=True)) for r in kernel.runs)


def floor(way: str, pairs: float, dim: int, chip: Chip) -> tuple[float, float]:
    """Least and most MXU cycles of the products of `pairs`; the orientation of a product matters.

    bfloat16 operands; `pairs` in tiles whose sides are multiples of the MXU's width.
    """
    side = 256
    scores = chip.mxu_cycles(side, dim, side)  # q k', both orientations
    values = [chip.mxu_cycles(side, side, dim), chip.mxu_cycles(dim, side, side)]  # p v, or its '
    one = {"forward": 1, "backward": 2}[way]
    rest = PRODUCTS[way] - one
    scale = pairs / side**2
    return tuple(scale * (one * scores + rest * f(values)) for f in (min, max))


def computed_pairs(kernel: Schedule, way: str, heads: int, dim: int, chip: Chip) -> float:
    """Pairs of a query and a key that the kernel works on, per head, whether seen or not.

    Forward: by what the MXUs do. Backward, where a product may have either orientation: by the
    exponentials, one a pair.
    """
    if way == "forward":
        return kernel.total(kernel.busy) / heads / floor(way, 1.0, dim, chip)[1]
    return kernel.total(lambda x: x.exponentials) * VECTOR / heads


def reconcile(kernel: Schedule, way: str, facts: dict[str, Any], dim: int, chip: Chip) -> float:
    """Checks that the kernel works on the pairs the mask needs, and on none outside its tiles.

    Returns:
      The share of the pairs worked on that no query sees.

    Raises:
      StaticError: it does not, so its segments or their runs are misread.
    """
    visible, tiles = facts["visible_pairs"], facts["tile_pairs"]
    pairs = computed_pairs(kernel, way, facts["heads"], dim, chip)
    busy = kernel.total(kernel.busy) / facts["heads"]
    least, most = floor(way, pairs, dim, chip)
    if 0.99 * visible <= pairs <= 1.01 * tiles and 0.99 * least <= busy <= 1.01 * most:
        return 1 - visible / pairs
    raise StaticError(
        f"Kernel {kernel.name!r} works on {pairs:.0f} pairs of a query and a key with {busy:.0f} "
        f"cycles of the MXUs, but its mask has {visible:.0f}, its tiles {tiles:.0f}, and the "
        f"products need {least:.0f} to {most:.0f} cycles; the schedule is misread."
    )


def rows(report: Report, kinds: list[str], lengths: list[int]) -> tuple[list[Row], list[str]]:
    """Returns the rows of one topology, and a sentence for every schedule that is misread."""
    found, misread = [], []
    for kind in kinds:
        for length in lengths:
            device_microseconds = 0.0
            for name in report.cases:
                what, *rest = name.split("/")
                if kind not in (what, rest[0]) or str(length) != rest[-3] or what in OTHERS:
                    continue
                try:
                    row = _row(report, name)
                    device_microseconds += row.microseconds / row.cores
                    found.append(_with_others(row, report, kind, device_microseconds))
                except StaticError as error:
                    misread.append(f"{name} on {report.generation}: {error}")
    return found, misread


def _row(report: Report, name: str) -> Row:
    case, chip = report.cases[name], CHIPS[report.generation]
    *what, length, dim, dtype = name.split("/")
    length, dim = int(length), int(dim)
    (kernel,) = case.kernels
    way, heads = what[-1], case.facts["heads"]
    cycles = cycles_per_head(kernel, heads)
    masked = tflops = None
    floor_cycles = kernel.total(kernel.busy) / heads
    # What XLA prepares for the kernel, such as mask vectors over lanes, is written and read.
    hbm_bytes = (case.argument_bytes + case.output_bytes + 2 * case.scratch_bytes) / heads
    microseconds = cycles / chip.clock_ghz / 1e3
    hbm = hbm_bytes / chip.core_hbm_gbps / 1e3
    if way in PRODUCTS:
        pairs = case.facts["visible_pairs"]
        if dtype == "bfloat16":
            masked = reconcile(kernel, way, case.facts, dim, chip)
        useful = 2 * PRODUCTS[way] * dim * pairs
        tflops = useful * chip.cores / max(microseconds, hbm) / 1e6
    tiles = lambda measure: kernel.total(lambda x: measure(x) if x.vmatmul else 0)
    used = lambda unit: tiles(lambda x: kernel.busy(x, unit)) / tiles(lambda x: x.cycles)
    return Row(
        kernel=" ".join(what[1:]) or "cached",
        generation=chip.name,
        streams=case.facts["streams"],
        length=length,
        dim=dim,
        dtype=dtype,
        config=case.facts.get("config", {}),
        libtpu=report.libtpu,
        cycles=cycles,
        mxu_cycles=floor_cycles,
        loop_cycles=loop_cycles(kernel),
        outside_tiles=1 - tiles(in_loop) / kernel.total(in_loop),
        masked=masked,
        slots={unit: used(unit) for unit in SLOTS},
        cores=busy_cores(kernel),
        spills=sum(x.spills for x in kernel.segments),
        vmem_bytes=kernel.vmem_bytes,
        hbm_bytes=hbm_bytes,
        microseconds=max(microseconds, hbm),
        hbm_microseconds=hbm,
        tflops=tflops,
        compile_seconds=case.compile_seconds,
    )


def loop_cycles(kernel: Schedule) -> int:
    """Cycles of the deepest loop with products in it: the figure to watch for regressions."""
    bodies = [x for x in kernel.segments if x.vmatmul]
    depth = max((x.depth for x in bodies), default=0)
    return max((x.cycles for x in bodies if x.depth == depth), default=0)


def splash_cycles(case: Compiled, way: str, dim: int, chip: Chip) -> tuple[float, int]:
    """Cycles per head of a call to splash attention, and the cores it keeps busy."""
    (kernel,) = (k for k in case.kernels if ("_fwd_" in k.name) == (way == "forward"))
    cycles = cycles_per_head(kernel, case.facts["heads"])
    reconcile(kernel, way, case.facts, dim, chip)
    return cycles, busy_cores(kernel)


def _with_others(row: Row, report: Report, kind: str, device_microseconds: float) -> Row:
    """Adds the best splash attention and dense XLA, where they were compiled.

    Args:
      device_microseconds: ours on all cores, of the forward too if the row is a backward, because
        the program of dense XLA is.
    """
    what, *_, way = [*row.kernel.split(), ""][:2]
    tail = f"{row.length}/{row.dim}/{row.dtype}"
    changes: dict[str, Any] = {"device_microseconds": device_microseconds}
    dense = report.cases.get(f"dense/{what}/{way}/{tail}")
    if dense and dense.optimal_seconds > 0:  # on occasion the cost model says otherwise
        changes["dense_microseconds"] = dense.optimal_seconds * 1e6 / dense.facts["heads"]
    masks = VARIANTS[KINDS[kind].splash] if kind in KINDS and KINDS[kind].splash else ()
    best = {m: _best_splash(report, m, row, way) for m in masks}
    changes["splash"] = {m: x for m, x in best.items() if x}
    return dataclasses.replace(row, **changes)


def _best_splash(report: Report, mask: str, row: Row, way: str) -> dict[str, Any]:
    """The blocks with the fewest cycles, for all streams of a head; empty if none was compiled."""
    calls = row.streams // SPLASH[mask].streams
    found = []
    for name in splash_names(mask, row.length, row.dim, row.dtype):
        if name in report.cases:
            cycles, cores = splash_cycles(report.cases[name], way, row.dim, CHIPS[row.generation])
            blocks = name.split("/")[-1]
            found.append(dict(blocks=blocks, calls=calls, cycles=calls * cycles, cores=cores))
    return min(found, key=lambda x: x["cycles"], default={})
