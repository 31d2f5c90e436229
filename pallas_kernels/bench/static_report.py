"""Prints the static schedule of every Mosaic kernel in a file of cases, segment by segment.

  python -m pallas_kernels.bench.static_report --topology=v5p:2x2x1,v6e:2x2 cases.py [name ...]

The file defines CASES = {name: (function, [argument, ...])}; a jax.ShapeDtypeStruct is an argument
whose values do not matter, an array is one whose values decide what the kernel skips (a mask). A
value of CASES may also be a function of no arguments that returns such a pair.
"""

import argparse
import sys

from pallas_kernels.bench import aot
from pallas_kernels.bench.schedule import Schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5p:2x2x1", help="one or several, with commas")
    parser.add_argument("source", help="a Python file, or a module, that defines CASES")
    parser.add_argument("names", nargs="*", help="only these cases")
    args = parser.parse_args()
    try:
        for topology in args.topology.split(","):
            print_report(aot.compile_cases(args.source, topology, args.names))
    except aot.StaticError as error:
        sys.exit(f"{error}")


def print_report(report: aot.Report) -> None:
    """Prints every case of one topology."""
    print(f"== {report.topology}, libtpu {report.libtpu}, static schedule, not run on hardware")
    for name, case in report.cases.items():
        print(
            f"-- {name}: compiled in {case.compile_seconds} s, scratch "
            f"{case.scratch_bytes / 2**20:.1f} MiB"
        )
        for kernel in case.kernels:
            print(table(kernel))
    for name, error in report.errors.items():
        print(f"-- {name} does not compile: {error}")


def table(kernel: Schedule) -> str:
    """One line per segment; "runs" says how often, by core."""
    per_core = list(zip(*kernel.runs, strict=True)) or [("?",)] * len(kernel.segments)
    lines = [
        f"{kernel.name}: {sum(x.cycles for x in kernel.segments)} bundles, VMEM "
        f"{kernel.vmem_bytes / 2**20:.2f} MiB, {sum(x.spills for x in kernel.segments)} spills "
        "and fills",
        "  bundles        depth  cycles vmatmul  MXU busy   lane red.  xpose  spills  "
        "VALU  XLU VLOAD VSTORE  EUP     to  runs",
    ]
    for x, runs in zip(kernel.segments, per_core, strict=True):
        share = {u: n / kernel.capacity[u] / x.cycles for u, n in x.units.items()}
        lines.append(
            f"  {x.start:5}..{x.stop:<6} {'>' * x.depth or '-':>4}{x.label:>3} {x.cycles:6} "
            f"{x.vmatmul:7} {kernel.busy(x):7.0f} {share['MATMUL']:4.0%} {x.lane_reductions:8} "
            f"{x.transposes:6} {x.spills:7}  {share['VALU']:4.0%} {share['XLU']:4.0%} "
            f"{share['VLOAD']:4.0%} {share['VSTORE']:5.0%} {share['EUP']:5.0%} "
            f"{'' if x.branch is None else x.branch:>6}  {' '.join(map(str, runs))}"
        )
    if kernel.why_unknown:
        lines.append(f"  runs are unknown: {kernel.why_unknown}")
    else:
        lines.append(
            f"  all runs, all cores: {kernel.total(lambda x: x.cycles):.0f} cycles, MXU busy "
            f"{kernel.total(kernel.busy):.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
