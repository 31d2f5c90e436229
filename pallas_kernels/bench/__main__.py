"""Times attention, or compares static schedules.

python -m pallas_kernels.bench                                        on a TPU, or on a CPU
python -m pallas_kernels.bench --static --topology=v5p:2x2x1,v6e:2x2  without a TPU
"""

import argparse

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
"""


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
    parser.add_argument("--lengths", default="1024,2048", help="sequence lengths, with commas")
    parser.add_argument("--dim", type=int, default=128, help="head size")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--out", default="bench_static.json", help="with --static: the JSON rows")
    parser.add_argument(
        "--against",
        help="with --static: rows of an earlier run; do not compile splash and dense XLA again, "
        "and fail if a loop has grown by more than 5 %%",
    )
    args = parser.parse_args()
    if args.static:
        args.topology = args.topology or [CHIPS["v5p"].topology]
        from pallas_kernels.bench import static

        static.main(args)
        return
    import jax

    if jax.default_backend() == "tpu":
        from pallas_kernels.bench import device

        device.main(args)
    else:
        from pallas_kernels.bench import cpu

        cpu.main(args)


if __name__ == "__main__":
    main()
