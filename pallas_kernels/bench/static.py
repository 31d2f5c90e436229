"""The table of static schedules: own kernels against splash attention and dense XLA."""

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

from pallas_kernels.bench import aot
from pallas_kernels.bench.cases import GRAIN, KINDS, VARIANTS, splash_names
from pallas_kernels.bench.cost import PRODUCTS, SLOTS, Row, rows
from pallas_kernels.chips import CHIPS, MIB
from pallas_kernels.config import HEAD_SIZES

KEY = ("kernel", "generation", "length", "dim", "dtype")
FROM_BEFORE = ("splash", "dense_microseconds")


GROWTH = 1.05  # of a loop's cycles; figures within 3 % of each other are equal


def names(kinds: list[str], lengths: list[int], dim: int, dtype: str, others: bool) -> list[str]:
    """Every case needed for a table; `others`: those of splash attention and dense XLA too."""
    found: dict[str, None] = {}
    for length in lengths:
        for kind in kinds:
            if kind == "cached":
                found[f"cached/{length}/{dim}/{dtype}"] = None
                continue
            for way in PRODUCTS:
                tail = f"{kind}/{way}/{length}/{dim}/{dtype}"
                found |= {f"own/{tail}": None} | ({f"dense/{tail}": None} if others else {})
            if others and KINDS[kind].splash:
                for mask in VARIANTS[KINDS[kind].splash]:
                    found |= dict.fromkeys(splash_names(mask, length, dim, dtype))
    return list(found)


def main(args: argparse.Namespace) -> None:
    """Compiles, prints a table for every topology, and writes all rows as JSON.

    With `args.against`, a file of rows, splash attention and dense XLA are not compiled but taken
    from there, and the exit code is 1 if a loop's cycles have grown by more than 5 %. It is 1, too,
    if a schedule cannot be read.
    """
    kinds, lengths, before = args.kinds.split(","), _lengths(args.lengths), _before(args.against)
    unknown = [k for k in kinds if k not in (*KINDS, "cached")]
    if unknown:
        sys.exit(f"Unknown kinds {', '.join(unknown)}; use some of: {', '.join(KINDS)}, cached.")
    if args.dim not in HEAD_SIZES:
        sys.exit(f"Unknown head size {args.dim}; use one of: {', '.join(map(str, HEAD_SIZES))}.")
    found, sentences = [], []
    try:
        generations = [aot.check_topology(t) for value in args.topology for t in value.split(",")]
        for generation in generations:
            wanted = names(kinds, lengths, args.dim, args.dtype, others=not args.against)
            topology = CHIPS[generation].topology
            report = aot.compile_cases("pallas_kernels.bench.cases", topology, wanted)
            mine, misread = rows(report, kinds, lengths)
            mine = [with_before(r, before) for r in mine]
            found += mine
            print(table(mine, report), flush=True)
            sentences += misread + growth(mine, before)
    except aot.StaticError as error:
        sys.exit(f"{error}")
    document = [{**dataclasses.asdict(r), **derived(r)} for r in found]
    pathlib.Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    if sentences:
        sys.exit("\n".join(sentences))


def derived(row: Row) -> dict[str, float | None]:
    """Figures that follow from others, for readers of the file."""
    return {
        "ratio": row.ratio(row.best_splash),
        "mxu_share": row.mxu_share,
        "dense_ratio": row.dense_ratio,
    }


def _lengths(text: str) -> list[int]:
    found = [int(n) if n.isdigit() else 0 for n in text.split(",")]
    if any(n <= 0 or n % GRAIN for n in found):
        sys.exit(f"Lengths {text!r} are not multiples of {GRAIN}; use some like 1024,2048.")
    return found


def _before(path: str | None) -> dict[tuple, dict[str, Any]]:
    """Rows of an earlier run, by what they are about."""
    if path is None:
        return {}
    if not pathlib.Path(path).is_file():
        sys.exit(f"There is no file {path!r} to compare with; write one with --out first.")
    return {tuple(r[x] for x in KEY): r for r in json.loads(pathlib.Path(path).read_text())}


def with_before(row: Row, before: dict[tuple, dict[str, Any]]) -> Row:
    """The row, with what an earlier one with the same compiler says about the others."""
    old = before.get(tuple(getattr(row, x) for x in KEY), {})
    if old.get("libtpu") != row.libtpu:
        return row
    return dataclasses.replace(row, **{x: old[x] for x in FROM_BEFORE})


def growth(found: list[Row], before: dict[tuple, dict[str, Any]]) -> list[str]:
    """A sentence for every kernel whose loop has become longer."""
    sentences = []
    for row in found:
        old = before.get(tuple(getattr(row, x) for x in KEY))
        if old and row.loop_cycles > GROWTH * old["loop_cycles"]:
            sentences.append(
                f"The loop of {row.kernel} at L = {row.length} on {row.generation} has grown from "
                f"{old['loop_cycles']} to {row.loop_cycles} cycles, by more than 5 %."
            )
    return sentences


def table(found: list[Row], report: aot.Report) -> str:
    """The rows of one topology as people read them."""
    chip = CHIPS[report.generation]
    lines = [
        f"{chip.topology}, libtpu {report.libtpu}: static schedule, not run on hardware. Cycles "
        "and us are of one head with all its streams, on one core.",
        f"{'kernel':24}{'L':>6}{'cycles':>8}{'splash':>8}{'ratio':>6}{'2 calls':>8}{'MXU':>7}"
        f"{'busy':>5}{'outside':>8}{'masked':>7} {' '.join(f'{x[:4]:>4}' for x in SLOTS)}"
        f"{'spills':>7}{'VMEM':>6}{'us':>7}{'HBM':>6}{'TFLOP/s':>8}{'dense':>6}  best splash",
    ]
    lines += [_line(r) for r in found]
    lines += [f"{n} does not compile: {e[:300]}" for n, e in report.errors.items() if n[0] != "s"]
    return "\n".join(lines)


def _line(r: Row) -> str:
    show = lambda x, form: "-" if x is None else form.format(x)
    best = r.splash.get(r.best_splash, {})
    calls = next((m for m in r.splash if m != "interleaved"), None)
    cores = f", {best['cores']} core of {r.cores}" if best and best["cores"] != r.cores else ""
    return (
        f"{r.kernel:24}{r.length:6}{r.cycles:8.0f}{show(best.get('cycles'), '{:.0f}'):>8}"
        f"{show(r.ratio(r.best_splash), '{:.2f}'):>6}{show(r.ratio(calls), '{:.2f}'):>8}"
        f"{r.mxu_cycles:7.0f}{r.mxu_share:5.0%}{r.outside_tiles:8.0%}"
        f"{show(r.masked, '{:.0%}'):>7} {' '.join(f'{x:4.0%}' for x in r.slots.values())}"
        f"{r.spills:7}{r.vmem_bytes / MIB:6.1f}{r.microseconds:7.2f}{r.hbm_microseconds:6.2f}"
        f"{show(r.tflops, '{:.0f}'):>8}{show(r.dense_ratio, '{:.1f}x'):>6}  "
        + (f"{best['blocks']} {r.best_splash} x{best['calls']}{cores}" if best else "-")
    )
