"""Prints the static schedule of every Mosaic kernel in a file of cases, segment by segment.

  python -m pallas_kernels.bench.static_report --topology=v5p:2x2x1,v6e:2x2 cases.py [name ...]

The file defines CASES = {name: (function, [jax.ShapeDtypeStruct, ...])}; a value may also be a
function of no arguments that returns such a pair.
"""

import argparse
import sys

from pallas_kernels.bench import aot, schedule


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
            print(schedule.table(kernel))
    for name, error in report.errors.items():
        print(f"-- {name} does not compile: {error}")


if __name__ == "__main__":
    main()
