import numpy as np
import pytest

from aodiff.evals import any_order
from aodiff.evals.any_order import SCORES, character_steps, node_scores, nulls, scores, tree

SOURCE = '''import os


@wraps(f)
def outer(a, b=1):
    """Says what."""
    for i in a:
        if i > b:
            x = i
        elif i:
            x = 2
        else:
            x = 3
    try:
        y = os.getcwd()
    except OSError:
        y = 1
    finally:
        pass
    return x


n = 2
assert outer([1]) == n
'''


def shape(node):
    return [node.name, *map(shape, node.children)] if node.children else node.name


def test_a_program_is_a_tree_of_statements():
    assert shape(tree(SOURCE).root) == [
        "module",
        "Import",
        [
            "outer",
            ["For", ["If", "Assign", ["If", "Assign", "Assign"]]],
            ["Try", "Assign", "Assign", "Pass"],
            "Return",
        ],
        [any_order.TESTS, "Assign", "Assert"],
    ]
    cases = "        case 1:\n            a = 1\n        case _:\n            b = 2\n"
    other = "def f(x):\n    match x:\n" + cases
    assert shape(tree(other).root) == ["module", ["f", ["Match", "Assign", "Assign"]]]
    group = "try:\n    a\nexcept* OSError:\n    b\n"
    assert shape(tree(group).root) == ["module", ["TryStar", "Expr", "Expr"]]


def test_tokens_belong_to_the_deepest_statement():
    found = tree(SOURCE)
    words = [SOURCE[a:b] for a, b in found.spans]
    owner = {t: node for node in found.root.walk() for t in node.tokens}
    assert sorted(owner) == list(range(len(words)))
    at = lambda word, nth=0: owner[[i for i, w in enumerate(words) if w == word][nth]].name
    assert at("wraps") == at("b") == at('"""Says what."""') == "outer"
    assert at(">") == at("elif") == at("else") == "If" and at("except") == at("finally") == "Try"
    assert at("getcwd") == "Assign" and at("assert") == "Assert"
    accents = tree("é = 'ü'\nb = 1\n")
    assert [accents.root.children[1].start, accents.root.children[1].end] == [8, 13]


def by_turns(text):
    return [np.array([i for i, c in enumerate(text) if c == name]) for name in sorted(set(text))]


@pytest.mark.parametrize(
    "written, expected",
    [
        ("AAABBB", (0.5, 0, 0, 0.5)),  # flexmdm.md 15.22
        ("ABABAB", (1, 1, 1, 1)),
        ("AABBA", (1, 0.5, 0.25, 1)),  # A is taken up once, B is never left
        ("AABBCC", (1 / 3, 0, 0, 1 / 3)),
        ("ABC", (1 / 3, 0, 0, 1 / 3)),  # each complete at once
    ],
)
def test_scores_of_scripted_orders(written, expected):
    assert node_scores(by_turns(written)) == pytest.approx(dict(zip(SCORES, expected, strict=True)))


def test_scores_of_nodes_without_choice():
    assert node_scores([np.array([1, 5])]) == dict.fromkeys(SCORES, 1.0)
    assert node_scores([np.array([]), np.array([])]) == dict.fromkeys(SCORES, 0.0)
    half = node_scores([np.array([1, 2]), np.array([])])
    assert half["cbc"] == half["obw"] == 0.5
    at_once = node_scores([np.array([3, 3]), np.array([3])])
    assert (at_once["cbc"], at_once["rub"], at_once["obw"]) == (1, 0, 0.5)


def test_null_orders_and_variants():
    found = tree(SOURCE)
    base = nulls(found)
    serial, random = base["left_to_right"], base["random"]
    assert serial["split/rub"] == serial["split/rub_plus"] == 0
    assert random["split/rub"] > 0.8 and random["split/obw"] > 0.7
    assert serial["overall/cbc"] > serial["split/cbc"]  # a node with one child has 1
    steps = np.arange(len(found.spans))
    whole = scores(found, steps, "all")
    assert whole["split/obw"] != serial["split/obw"]
    entry = scores(found, steps, "entry_only", "outer")
    assert entry["split/obw"] == pytest.approx(np.mean([1 / 3, 1 / 2, 1 / 2, 1 / 3]))
    assert scores(found, steps, "entry_only", "other") == {}


def test_steps_of_tokens_are_those_of_their_last_character():
    found = tree("ab = 1\n")  # pieces "a", "b =", two that make " 1", and the end of the line
    steps = found.steps(character_steps([1, 3, 2, 0, 1], [5, 2, 1, 9, 0]))
    assert [(("ab = 1\n")[a:b], s) for (a, b), s in zip(found.spans, steps, strict=True)] == [
        ("ab", 5),
        ("=", 2),
        ("1", 9),
        ("\n", 0),
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("x = 1\n", (0, "x = 1\n")),
        ("Here:\n```python\nx = 1\n```\nDone.", (16, "x = 1\n")),
        ("x = 1\n```\nThat is all, folks.", (0, "x = 1\n")),
        ("It is so:\nx = 1\ny = 2\nand no more", (10, "x = 1\ny = 2\n")),
        ("not a program at all", None),
        ("", None),
    ],
)
def test_where_the_program_of_a_text_is(text, expected):
    assert any_order.program(text) == expected
