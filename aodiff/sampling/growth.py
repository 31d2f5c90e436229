"""From the names of a config to rows that grow while they are decoded."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from aodiff.sampling import canvas
from aodiff.sampling.carve import Carve, carve
from aodiff.sampling.daedal import Daedal, daedal
from aodiff.sampling.denoise import Decoder, Denoise, check_growth

NONE = "none"
OPTIONS: dict[str, Callable[..., Carve | Daedal]] = {"carve": Carve, "daedal": Daedal}

# given (B, C) bool -> `length`, `grow` and `reach` of `decode`.
Plan = Callable[[Denoise, jax.Array], dict[str, Any]]


def make_plan(
    room: tuple[int, ...],
    capacity: int,
    kind: str,
    options: Mapping[str, Mapping],
    decoder: Decoder,
    *,
    mask_id: int,
    end: int | None,
) -> Plan:
    """How long rows are at first and how they grow.

    Args:
      room: (positions to write at first, at most), (): as many as rows hold, and none grow.
      capacity: positions of a row.
      kind: "none", "carve" or "daedal". options: their choices, by kind.
      decoder: what reveals the positions.
      end: id that ends an answer, None: there is none.

    Raises:
      ValueError: an unknown kind, no room to grow, a decoder whose rows cannot grow, or DAEDAL
        without an end symbol.
    """
    if kind not in (NONE, *OPTIONS):
        raise ValueError(f"sample.grow={kind!r} is unknown; use {', '.join((NONE, *OPTIONS))}")
    if room and not (len(room) == 2 and 1 <= room[0] <= room[1] <= capacity):
        raise ValueError(
            f"sample.canvas={tuple(room)} is not (positions to write at first, at most); give two "
            f"numbers of 1 to {capacity}, the first no larger, or () for all of a row"
        )
    if kind != NONE and not room:
        raise ValueError(
            f"sample.grow={kind!r} with sample.canvas=() starts with all of a row; set the "
            "positions to write at first and at most"
        )
    if kind == "daedal" and end is None:
        raise ValueError("sample.grow='daedal' looks for an end symbol, and the data have none")
    if kind != NONE:
        check_growth(decoder)
    chosen = None if kind == NONE else OPTIONS[kind](**options[kind])

    def plan(denoise: Denoise, given: jax.Array) -> dict[str, Any]:
        length, most = canvas.room(given, *(room or (0, 0)))
        if isinstance(chosen, Carve):
            grow = carve(denoise, chosen, mask_id, most, bool(decoder.block))
            reach = lambda length: jnp.minimum(length + chosen.growth, most)
        elif isinstance(chosen, Daedal):  # which grows as often as it likes before its first step
            grow, reach = daedal(denoise, chosen, mask_id, end, most), lambda length: most
        else:
            grow, reach = None, None
        return {"length": length, "grow": grow, "reach": reach}

    return plan
