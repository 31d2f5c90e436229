"""Arrays in the text of a compiled program, and which of them are over pairs of positions."""

import math
import re

SHAPE = re.compile(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]+)\]")


def shapes_of(text: str) -> list[tuple[int, ...]]:
    """The shapes of all arrays in the text of a program, each once."""
    return sorted({tuple(map(int, dims.split(","))) for dims in SHAPE.findall(text)})


def quadratic(shapes: list[tuple[int, ...]], length: int) -> list[tuple[int, ...]]:
    """Those with two dimensions over positions, or with as many elements in whatever form."""
    return [
        shape
        for shape in shapes
        if sum(size >= length for size in shape) >= 2 or math.prod(shape) >= length**2
    ]
