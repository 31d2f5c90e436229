"""Times attention, or compares static schedules.

python -m pallas_kernels.bench                                        on a TPU, or on a CPU
python -m pallas_kernels.bench --static --topology=v5p:2x2x1,v6e:2x2  without a TPU
"""

import argparse
from typing import Any

from pallas_kernels.chips import CHIPS

NOTES = """\
cycles, splash, ratio   ours, the cheapest use of splash attention found, ours / splash
2 calls                 ours / splash attention called once per stream; the cheapest may be one
                        call with the rows of both streams interleaved
MXU, busy               cycles if only the MXUs limited it (the floor), and its share of all cycles
outside                 share of cycles outside segments with products: per-step overhead
masked                  share of the pairs worked on that no query sees: the diagonal
VALU ... EUP            share of these slots in use, in segments with products
us, HBM                 cycles / clock, or HBM traffic if that is longer; HBM traffic alone
TFLOP/s                 useful, per chip
dense                   time of dense XLA (its own lower bound) over ours; backward rows: both ways
Cycles are those of the kernels. What XLA does around them is not in ours nor in splash's: delta of
the backward (both), splash's sum of dQ over key blocks, our spreading of interval vectors over
lanes (in HBM) and the zeroing of padding.
"""

STATIC = {"lengths": "1024,2048", "dim": 128, "dtype": "bfloat16", "out": "bench_static.json"}
CPU = {"lengths": "256,512,1024,2048", "dim": 64, "dtype": "float32", "out": "bench_cpu.json"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog=f"Columns of the static table:\n{NOTES}",
    )
    parser.add_argument("--static", action="store_true", help="static schedules; needs libtpu")
    parser.add_argument(
        "--topology",
        action="append",
        help=f"with --static, some of: {', '.join(c.topology for c in CHIPS.values())}",
    )
    parser.add_argument(
        "--kinds",
        default="two_stream,full_length,uniform_length,cached",
        help="with --static: one or several, with commas",
    )
    parser.add_argument(
        "--lengths",
        help=f"with commas; default {STATIC['lengths']}, on a CPU {CPU['lengths']}",
    )
    parser.add_argument(
        "--dim", type=int, help=f"head size; default {STATIC['dim']}, on a CPU {CPU['dim']}"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help=f"of inputs; default {STATIC['dtype']}, on a CPU {CPU['dtype']}",
    )
    parser.add_argument(
        "--out", help=f"the JSON rows; default {STATIC['out']}, on a CPU {CPU['out']}"
    )
    parser.add_argument(
        "--against",
        help="with --static: rows of an earlier run; do not compile splash and dense XLA again, "
        "and fail if a loop has grown by more than 5 %%",
    )
    args = parser.parse_args()
    if args.static:
        args.topology = args.topology or [CHIPS["v5p"].topology]
        from pallas_kernels.bench import static

        static.main(_filled(args, STATIC))
        return
    import jax

    if jax.default_backend() == "tpu":
        from pallas_kernels.bench import device

        device.main(_filled(args, STATIC))
    else:
        from pallas_kernels.bench import cpu

        cpu.main(_filled(args, CPU))


def _filled(args: argparse.Namespace, defaults: dict[str, Any]) -> argparse.Namespace:
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**{**vars(args), **defaults, **given})


if __name__ == "__main__":
    main()
