"""What a config may ask of rows that grow, and how long rows are then."""

import jax.numpy as jnp
import pytest

from aodiff.sampling.denoise import Decoder
from aodiff.sampling.growth import make_plan

LINEAR = Decoder("confidence", "linear", 16)
OPTIONS = {"carve": {"growth": 4}, "daedal": {"growth": 4}}


def plan(room, kind="none", decoder=LINEAR, end=1, options=OPTIONS):
    return make_plan(room, 16, kind, options, decoder, mask_id=2, end=end)


@pytest.mark.parametrize("kind", ["none", "carve", "daedal"])
def test_rows_begin_at_their_first_length(kind):
    given = jnp.arange(16)[None] < jnp.array([[3], [12]])
    found = plan((5, 9), kind)(None, given)
    assert found["length"].tolist() == [8, 16] and (found["grow"] is None) == (kind == "none")
    reach = {"none": None, "carve": [12, 16], "daedal": [12, 16]}[kind]
    assert reach == (found["reach"] and found["reach"](found["length"]).tolist())
    assert plan(())(None, given)["length"].tolist() == [16, 16]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"room": (4, 8), "kind": "grow"}, "sample.grow='grow' is unknown; use none, carve, dae"),
        ({"room": (8, 4)}, r"sample.canvas=\(8, 4\) is not"),
        ({"room": (8, 17)}, "two numbers of 1 to 16"),
        ({"room": (8,)}, r"sample.canvas=\(8,\) is not"),
        ({"room": (), "kind": "carve"}, r"with sample.canvas=\(\) starts with all of a row"),
        ({"room": (4, 8), "kind": "daedal", "end": None}, "looks for an end symbol"),
        (
            {"room": (4, 8), "kind": "carve", "options": {"carve": {"window": 3}}},
            "sample.carve.window=3 is odd",
        ),
        (
            {"room": (4, 8), "kind": "carve", "decoder": Decoder("confidence", "cosine", 16)},
            "rows cannot grow with schedule 'cosine'",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(choice, words):
    with pytest.raises(ValueError, match=words):
        plan(**choice)
