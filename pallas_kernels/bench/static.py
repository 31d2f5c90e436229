"""The table of static schedules: own kernels against splash attention and dense XLA."""

import argparse
import dataclasses
import json
import pathlib
import sys

from pallas_kernels.bench import aot
from pallas_kernels.bench.cases import KINDS, splash_names
from pallas_kernels.bench.cost import PRODUCTS, Row, rows
from pallas_kernels.chips import CHIPS, MIB


def names(kinds: list[str], lengths: list[int], dim: int, dtype: str) -> list[str]:
    """Every case needed for a table."""
    found: dict[str, None] = {}
    for length in lengths:
        for kind in kinds:
            if kind == "cached":
                found[f"cached/{length}/{dim}/{dtype}"] = None
                continue
            for way in PRODUCTS:
                tail = f"{kind}/{way}/{length}/{dim}/{dtype}"
                found |= {f"own/{tail}": None, f"dense/{tail}": None}
            if KINDS[kind].splash:
                found |= dict.fromkeys(splash_names(KINDS[kind].splash, length, dim, dtype))
    return list(found)


def main(args: argparse.Namespace) -> None:
    """Compiles, prints a table for every topology, and writes all rows as JSON."""
    topologies = [t for value in args.topology for t in value.split(",")]
    kinds, lengths = args.kinds.split(","), [int(n) for n in args.lengths.split(",")]
    unknown = [k for k in kinds if k not in (*KINDS, "cached")]
    if unknown:
        sys.exit(f"Unknown kinds {', '.join(unknown)}; use some of: {', '.join(KINDS)}, cached.")
    found: list[Row] = []
    try:
        for topology in topologies:  # all of them, before the first compilation
            aot.check_topology(topology)
        for topology in topologies:
            wanted = names(kinds, lengths, args.dim, args.dtype)
            report = aot.compile_cases("pallas_kernels.bench.cases", topology, wanted)
            mine = rows(report, kinds, lengths, args.dim, args.dtype)
            found += mine
            print(table(mine, report), flush=True)
    except aot.StaticError as error:
        sys.exit(f"{error}")
    document = [
        {**dataclasses.asdict(r), "ratio": r.ratio, "mxu_share": r.mxu_share} for r in found
    ]
    pathlib.Path(args.out).write_text(json.dumps(document, indent=1) + "\n")


def table(found: list[Row], report: aot.Report) -> str:
    """The rows of one topology as people read them."""
    chip = CHIPS[report.generation]
    lines = [
        f"{chip.topology}, libtpu {report.libtpu}: static schedule, not run on hardware. Cycles "
        "and us are of one head with all its streams, on one core.",
        f"{'kernel':24}{'L':>6}{'cycles':>8}{'splash':>8}{'ratio':>7}{'MXU':>8}{'busy':>6}"
        f"{'outside':>8}{'masked':>7}  {'VALU XLU  VLD  VST  EUP':24}{'spills':>7}{'VMEM':>6}"
        f"{'us':>8}{'HBM us':>7}{'TFLOP/s':>8}{'dense':>6}  best splash",
    ]
    show = lambda x, form: "-" if x is None else form.format(x)
    for r in found:
        slots = " ".join(f"{x:4.0%}" for x in r.slots.values())
        cores = "" if r.splash_cores in (None, r.cores) else f", {r.splash_cores} core of {r.cores}"
        lines.append(
            f"{r.kernel:24}{r.length:6}{r.cycles:8.0f}{show(r.splash_cycles, '{:.0f}'):>8}"
            f"{show(r.ratio, '{:.2f}'):>7}{r.mxu_cycles:8.0f}{r.mxu_share:6.0%}"
            f"{r.outside_tiles:8.0%}{show(r.masked, '{:.0%}'):>7}  {slots:24}{r.spills:7}"
            f"{r.vmem_bytes / MIB:6.1f}{r.microseconds:8.2f}{r.hbm_microseconds:7.2f}"
            f"{show(r.tflops, '{:.0f}'):>8}{show(r.dense_ratio, '{:.1f}x'):>6}  "
            f"{r.splash or '-'}{cores}"
        )
    lines += [f"{n} does not compile: {e[:300]}" for n, e in report.errors.items() if n[0] != "s"]
    return "\n".join(lines)
