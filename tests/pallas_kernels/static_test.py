"""Static schedules: reading dumps, running their scalar code, the pairs a mask needs, libtpu."""

import dataclasses
import importlib.util
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench import aot, cost, execute, prefetch, schedule, static
from pallas_kernels.bench.cases import KINDS, SPLASH, splash_names, tile_pairs, visible_pairs
from pallas_kernels.chips import CHIPS, generation_of
from pallas_kernels.config import default_config
from pallas_kernels.masks import visible

# Per step i of three: the inner loop runs table[i] times, or is jumped over when that is zero.
BUNDLES = """\
= control target key start
LB: loop body

     0   :  { %s1_s0 = smov.u32 0 /* a comment; with ;; and } in it */  ;;  %s2_s9 = inlined_call_operand.hbm [shape: f32[8,128]] }
   0x1 LB: > { %s3_s0 = sphi %s1_s0, %s4_s0  ;;  %v1_v0 = vld [vmem:[#allocation5] sm:$0xff] /* window
of two lines */ }
   0x2   : > { %s5_s1 = sld [smem:[#allocation3 + %s3_s0]]  ;;  %s6_s2 = smov.u32 0 }
   0x3   : > { %p1_p0 = scmp.le.s32.totalorder %s5_s1, 0 }
   0x4   : > { %10 = sbr.rel (%p1_p0) target bundleno = 17 (0x11), region = 3 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   :  {}
   0x9 LB: >> { %s7_s2 = sphi %s6_s2, %s8_s2  ;;  %11 = vmatmul.bf16.gmra.mxu0 %v1_v0 }
   0xa   : >> { %s8_s2 = sadd.s32 1, %s7_s2  ;;  %v2_v1 = vmax.xlane.f32.xlu0 %v1_v0  ;;  %v3_v2 = vexp2.f32 %v1_v0 }
   0xb   : >> { %p2_p1 = scmp.ge.s32.totalorder %s8_s2, %s5_s1 }
   0xc   : >> { %12 = sbr.rel (!%p2_p1) target bundleno = 9 (0x9), region = 4 }
   0xd   :  {}
   0xe   :  {}
   0xf   : >> { %13 = vmatmul.bf16.gmra.mxu0 %v1_v0 }
  0x10   :  {}
  0x11 PF: > { %s4_s0 = sadd.s32 1, %s3_s0 }
  0x12   : > { %p3_p2 = scmp.lt.s32.totalorder %s4_s0, 3 }
  0x13   : > { %14 = sbr.rel (%p3_p2) target bundleno = 1 (0x1), region = 5 }
  0x14   :  { %s90_s0 = smov.u32 7 /* the register, not the value, of the next step */ }
  0x15   :  {}
  0x16   :  {}
  0x17   :  {}
  0x18   :  { %15 = vst [vmem:[#allocation6]] %v1_v0 }
"""  # noqa: E501
ALLOCATIONS = """\
  #allocation3 [shape = 's32[3]{0}', space=smem, size = 0x200, scoped, tag = 'prefetched SMEM operand 0']
  #allocation5 [shape = 'u8[4096]{0}', space=vmem, size = 0x1000, scoped, tag = 'input window']
  #allocation6 [shape = 'u8[8192]{0}', space=vmem, size = 8192, scoped, tag = 'output window']
"""  # noqa: E501


DELAY = 4
BODY = "2 0 0 1 0 0 0 3 0 4 0"
IDLE = "0 0 0 0 0 0 0 0 0 0 1"


def utilization(rows: list[str]) -> schedule.Utilization:
    header = (
        "== CAPACTIY:\nMATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, "
        "VSTORE:SPILL, SALU\n 4 4 3 4 2 1 3 3 1 1 2\n== UTILIZATION:\n"
    )
    return schedule.parse_utilization(header + "\n".join(rows))


def kernel(table: list[int], bundles: str = BUNDLES, body: str = BODY) -> schedule.Schedule:
    """The kernel of `BUNDLES`; `body` is the use of units in every cycle of the inner loop."""
    parsed = schedule.parse_bundles(bundles)
    use = utilization([body if 9 <= n < 17 else IDLE for n in range(len(parsed))])
    cut = schedule.segments(parsed, use, DELAY)
    memory = execute.scalar_memory(ALLOCATIONS, [np.array(table, np.int32)])
    runs = [execute.segment_runs(execute.count(parsed, memory, DELAY), cut)]
    return schedule.Schedule("k", cut, use.capacity, schedule.parse_vmem(ALLOCATIONS), runs)


def test_segments_of_a_dump():
    k = kernel([2, 0, 3])
    assert [(s.start, s.stop, s.depth, s.label) for s in k.segments] == [
        (0, 1, 0, ""),
        (1, 9, 1, "LB"),
        (9, 17, 2, "LB"),
        (17, 24, 1, "PF"),
        (24, 25, 0, ""),
    ]
    assert [s.vmatmul for s in k.segments] == [0, 0, 2, 0, 0]
    assert [s.lane_reductions for s in k.segments] == [0, 0, 1, 0, 0]
    assert [s.exponentials for s in k.segments] == [0, 0, 1, 0, 0]
    assert [s.branch for s in k.segments] == [None, 17, 9, 1, None]
    assert k.vmem_bytes == 4096 + 8192
    body = k.segments[2]
    assert (body.cycles, k.busy(body), body.spills) == (8, 8 * 2 / 4, 8 * (3 + 4))


@pytest.mark.parametrize("table", [[2, 0, 3], [0, 0, 0], [1, 1, 1]])
def test_runs_are_those_of_the_tables(table):
    k = kernel(table)
    assert k.runs == [[1, 3, sum(table), 3, 1]]
    assert k.total(lambda x: x.cycles) == 1 + 3 * 8 + sum(table) * 8 + 3 * 7 + 1
    assert k.total(lambda x: x.vmatmul) == 2 * sum(table)


def test_an_unknown_branch_is_refused():
    with pytest.raises(execute.UnknownBranch, match="%p1_p0, whose value is unknown"):
        bundles = schedule.parse_bundles(BUNDLES)
        execute.count(bundles, execute.scalar_memory(ALLOCATIONS, []), DELAY)
    with pytest.raises(execute.UnknownBranch, match="depends on %p1_p0"):
        kernel([1, 1, 1], BUNDLES.replace("sld [smem:[#allocation3 + %s3_s0]]", "snew %s3_s0"))


def test_a_dump_with_a_hole_is_refused():
    with pytest.raises(ValueError, match="numbers bundle 10 as 0xb"):
        schedule.parse_bundles("\n".join(x for x in BUNDLES.splitlines() if "0xa " not in x))


def test_tables_as_they_lie_in_scalar_memory():
    words = execute._words(np.array([[1, 2], [3, 4], [5, 6], [7, -1], [9, 10]], np.int8))
    assert len(words) == 256
    assert words[0] == 1 + (3 << 8) + (5 << 16) + (7 << 24)
    assert words[1] == 2 + (4 << 8) + (6 << 16) - (1 << 24)
    assert words[128] == 9 and words[129] == 10
    words = execute._words(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert words[2] == 2 and words[128 + 1] == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [(128, 256), (256, 128)])
def test_pairs_and_tiles_against_enumeration(kind, blocks):
    length = 512
    mask = KINDS[kind].mask(length)
    seen = np.asarray(visible(mask))
    assert visible_pairs(mask) == seen.sum() / len(seen)
    bq, bk = blocks
    tiles = seen.reshape(len(seen), -1, length // bq, bq, length // bk, bk).any((1, 3, 5))
    expected = tiles.sum() / len(seen) * bq * bk * mask.streams
    assert tile_pairs(mask, length, bq, bk) == expected


def test_uniform_lengths_are_the_mean_over_all_lengths():
    length, block = 512, 256
    by_length = [(-(-n // block) * block) ** 2 for n in range(1, length + 1)]
    assert tile_pairs(KINDS["uniform_length"].mask(length), length, block, block) == np.mean(
        by_length
    )


@pytest.mark.parametrize("name", CHIPS)
def test_floor_of_a_tile(name):
    """The floors of kernels.md sections 9.1 and 10, of 512 x 512 tiles, D = 128."""
    wide = name in ("v6e", "tpu7x")
    assert cost.floor("forward", 512**2, 128, CHIPS[name])[1] == (512 if wide else 1024)
    least, most = cost.floor("backward", 2 * 512**2, 128, CHIPS[name])
    assert least <= (2 * 1152 if wide else 2 * 2560) <= most


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_pairs_that_do_not_match_the_mask_are_refused(way):
    row = {"forward": "2 0 0 1 0 0 0 3 0 4 0", "backward": "5 0 0 1 0 1 0 3 0 4 0"}[way]
    chip, passes = CHIPS["v5p"], 6
    pairs = {"forward": 8 * passes * 2 / 4 / 1024 * 512**2, "backward": passes * 1024}[way]
    k = kernel([2, 1, 3], body=row)
    assert cost.computed_pairs(k, way, 1, 128, chip) == pairs
    facts = {"heads": 1, "visible_pairs": 0.7 * pairs, "tile_pairs": pairs}
    assert cost.reconcile(k, way, facts, 128, chip) == pytest.approx(0.3)
    for change in ({"visible_pairs": 1.1 * pairs}, {"tile_pairs": 0.9 * pairs}):
        with pytest.raises(aot.StaticError, match="the schedule is misread"):
            cost.reconcile(k, way, facts | change, 128, chip)
    twice = kernel([2, 1, 3], body=row.replace("5 0", "9 0", 1))
    if way == "backward":
        with pytest.raises(aot.StaticError, match="the schedule is misread"):
            cost.reconcile(twice, way, facts, 128, chip)


def test_cycles_per_head_need_known_runs():
    k = kernel([2, 1, 3])
    assert cost.cycles_per_head(k, 2) == (3 * 8 + 6 * 8 + 3 * 7) / 2  # not what runs once per call
    unknown = schedule.Schedule("k", k.segments, k.capacity, 0, [], "a branch")
    with pytest.raises(aot.StaticError, match="unknown: a branch"):
        cost.cycles_per_head(unknown, 1)


@pytest.mark.parametrize("mask", SPLASH)
def test_splash_candidates_are_legal(mask):
    rows = SPLASH[mask].streams
    for length in (512, 1024, 2048):
        names = splash_names(mask, length, 128, "bfloat16")
        assert names
        for name in names:
            bq, bk, compute = map(int, name.split("/")[-1].split("x"))
            assert length % bk == 0 and bk % compute == 0 and rows * length % bq == 0


def test_interleaved_streams_see_the_same_keys():
    from pallas_kernels.bench import cases

    mask = cases.SPLASH["interleaved"].mask(512, 256)
    dense = mask[:, :].reshape(4, 2, 128, 512).swapaxes(0, 1).reshape(2, 512, 512)
    np.testing.assert_array_equal(dense, np.broadcast_to(np.tri(512, dtype=bool), dense.shape))


def test_prefetched_tables_of_a_program():
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def call(table, x):
        body = lambda table, x, o: o.__setitem__((...,), x[...] * table[0])
        grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,))
        return pl.pallas_call(body, out_shape=x, grid_spec=grid, name="times")(table, x)

    def program(lengths, x):
        return call(jax.lax.div(lengths, 128), call(lengths + 1, x))

    lengths, x = jnp.array([256, 128]), jax.ShapeDtypeStruct((8, 128), jnp.float32)
    found = prefetch.tables(jax.jit(program).trace(lengths, x).jaxpr, [lengths, x])
    assert [(n, [t.tolist() for t in tables]) for n, tables in found] == [
        ("times", [[257, 129]]),
        ("times", [[2, 1]]),
    ]


def test_chips():
    kinds = [k for c in CHIPS.values() for k in c.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert generation_of("TPU v5 lite") == "v5e" and generation_of("cpu") is None
    for chip in CHIPS.values():  # peak = cores x MXUs x width^2 x rows x 2 flops x clock
        peak = 2 * chip.cores * chip.mxus * chip.mxu_width**2 * chip.mxu_rows * chip.clock_ghz / 1e3
        assert peak == pytest.approx(chip.peak_tflops, rel=0.02), chip.name


def test_bad_input_is_one_sentence(monkeypatch):
    with pytest.raises(aot.StaticError, match="use one of: v4:2x2x1, v5e:2x2x1, v5p:2x2x1, v6e:2"):
        aot.compile_cases("cases.py", "v9:2x2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(aot.StaticError, match=r"pip install -e '\.\[tpu\]'\.$"):
        aot.compile_cases("cases.py", "v4:2x2x1")


CASES = """
    import jax, jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def product(x, y):
        def body(a, b, o):
            o[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
        out = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32)
        return pl.pallas_call(body, out_shape=out, name="product")(x, y)

    def repeated(table, y):
        def body(table, a, o):
            o[...] = jnp.zeros_like(o)
            def step(i, _):
                o[...] += jnp.dot(a[...], a[...], preferred_element_type=jnp.float32)
            jax.lax.fori_loop(0, table[pl.program_id(0), pl.program_id(1)], step, None)
        block = pl.BlockSpec((128, 128), lambda i, j, table: (0, 0))
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=table.shape, in_specs=[block], out_specs=block
        )
        out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        return pl.pallas_call(body, out_shape=out, grid_spec=grid, name="repeated")(table, y)

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    CASES = {
        **{f"rows{n}": (product, [shape(n, 128), shape(128, 128)]) for n in (16, 128, 1024)},
        "repeated": (repeated, [jnp.array([[3, 0, 2], [1, 4, 0]], jnp.int32), shape(128, 128)]),
        "broken": (lambda x: jnp.dot(x, x), [shape(2, 3)]),
    }
"""


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


@pytest.fixture
def cases_file(tmp_path):
    file = tmp_path / "cases.py"
    file.write_text(textwrap.dedent(CASES))
    return str(file)


@needs_libtpu
def test_spans_are_those_of_the_hardware(cases_file):
    """Spans of kernels.md section 8.3, measured on a v4, plus a constant start."""
    report = aot.compile_cases(cases_file, "v4:2x2x1", ["rows16", "rows128", "rows1024", "broken"])
    kernels = [c.kernels[0] for c in report.cases.values()]
    spans = [k.total(lambda x: x.cycles) for k in kernels]
    starts = {s - span for s, span in zip(spans, (157, 193, 417), strict=True)}
    assert len(starts) == 1 and 0 < starts.pop() < 100, spans
    assert [k.total(k.busy) for k in kernels] == [4, 32, 256]
    assert list(report.errors) == ["broken"] and "TypeError" in report.errors["broken"]


@needs_libtpu
@pytest.mark.parametrize("generation", ["v4", "v5p", "tpu7x"])  # 1, 4 and 6 delay slots
def test_loops_driven_by_tables(cases_file, generation):
    report = aot.compile_cases(cases_file, generation, ["repeated"])
    (kernel,) = report.cases["repeated"].kernels
    runs = [sum(n) for n in zip(*kernel.runs, strict=True)]  # over cores
    assert [n for n, s in zip(runs, kernel.segments, strict=True) if s.vmatmul] == [10]


def test_own_configuration_has_tiles_the_grain_allows():
    for generation in CHIPS:
        c = default_config(1, 2048, 2048, generation=generation)
        assert not any(n % 128 for n in (c.bq, c.bk, c.bwd_bq, c.bwd_bk))


def compiled(pairs: float, name: str = "k", **facts) -> aot.Compiled:
    """One head; 48 cycles of the synthetic loop, in a backward's units, work on 6 K pairs."""
    body = "5 0 0 1 0 1 0 3 0 4 0"
    made = dataclasses.replace(kernel([2, 1, 3], body=body), name=name)
    facts = {"heads": 1, "streams": 1, "visible_pairs": pairs, "tile_pairs": pairs, **facts}
    return aot.Compiled([made], facts, 1.0, 2800, 0, 0, optimal_seconds=1e-6)


def test_rows_of_a_report():
    pairs = 6 * 1024
    splash = compiled(pairs, "splash_mha_dkv_no_residuals", heads=2, visible_pairs=pairs / 2)
    report = aot.Report(
        "v5p:2x2x1",
        "0",
        {
            "own/one_stream/backward/512/128/bfloat16": compiled(pairs),
            "own/block_rank/backward/512/128/bfloat16": compiled(pairs),
            "own/rank/backward/512/128/bfloat16": compiled(2 * pairs),
            "dense/one_stream/backward/512/128/bfloat16": compiled(pairs),
            "splash/causal/512/128/bfloat16/512x512x512": splash,
        },
        {},
    )
    found, misread = cost.rows(report, ["one_stream", "rank"], [512])
    assert [r.kernel for r in found] == ["one_stream backward"]  # block_rank was not asked for
    assert len(misread) == 1 and "own/rank/backward/512" in misread[0]
    (row,) = found
    cycles = 3 * 8 + 6 * 8 + 3 * 7
    assert row.cycles == cycles and row.loop_cycles == 8 and row.masked == 0
    assert row.outside_tiles == pytest.approx(1 - 6 * 8 / cycles)
    assert row.splash["causal"]["blocks"] == "512x512x512"
    assert row.ratio(row.best_splash) == 2  # the same cycles for two heads
    assert row.hbm_microseconds == pytest.approx(2800 / (2765e3 / 2))
    assert row.microseconds == pytest.approx(cycles / 1750)
    assert row.dense_ratio == pytest.approx(1.0 / row.microseconds)


def test_growth_of_a_loop_is_noticed():
    report = aot.Report(
        "v4", "0", {"own/one_stream/backward/512/128/bfloat16": compiled(6 * 1024)}, {}
    )
    (row,), _ = cost.rows(report, ["one_stream"], [512])
    key = tuple(getattr(row, x) for x in static.KEY)
    old = dataclasses.asdict(row) | {"dense_microseconds": 3.0}
    assert not static.growth([row], {key: old})
    assert static.with_before(row, {key: old}).dense_microseconds == 3.0
    assert static.with_before(row, {key: old | {"libtpu": "1"}}).dense_microseconds is None
    longer = dataclasses.replace(row, loop_cycles=9)
    (sentence,) = static.growth([longer], {key: old})
    assert "has grown from 8 to 9 cycles" in sentence
