import collections

import numpy as np
import pytest

from aodiff import data
from aodiff.config import base
from aodiff.data import mazes
from aodiff.data.maze import carve, survey

RING = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]], bool)


def config(name="maze", **changes):
    c = base().data
    c.update(dict(name=name, seq_len=30, clues=(2, 4), maze=(7, 0.3), eval_rows=500) | changes)
    return c


def rows(c, split="validation"):
    source = data.open_splits(c)[split]
    return source.read(np.arange(len(source)))


def beside(free, cell):
    """Free cells beside a cell, one by one."""
    r, c = divmod(cell, len(free))
    for x, y in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
        if 0 <= x < len(free) and 0 <= y < len(free) and free[x, y]:
            yield x * len(free) + y


def search(free, start):
    """Steps to each cell that can be reached."""
    found, queue = {start: 0}, collections.deque([start])
    while queue:
        cell = queue.popleft()
        for other in beside(free, cell):
            if other not in found:
                found[other] = found[cell] + 1
                queue.append(other)
    return found


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_distances_and_neighbours_are_those_of_a_search(share):
    maze = survey(carve(7, share, seed=1))
    cells = np.flatnonzero(maze.free)
    for cell in cells.tolist():
        found = search(maze.free, cell)
        assert set(found) == set(cells.tolist())  # all of them are joined
        assert all(maze.steps[cell, other] == steps for other, steps in found.items())
        assert set(maze.near[cell]) - {-1} == set(beside(maze.free, cell))
    walls = np.flatnonzero(~maze.free)
    assert np.all(maze.steps[walls] == -1) and np.all(maze.near[walls] == -1)


def test_rooms_are_free_posts_are_not_and_a_perfect_maze_is_a_tree():
    for seed in range(5):
        free = carve(9, 0.0, seed)
        assert free[::2, ::2].all() and not free[1::2, 1::2].any()
        assert free.sum() == 25 + 24
    assert carve(9, 1.0, 0).sum() == 81 - 16


def test_the_law_of_the_smallest_maze_is_that_of_its_trees():
    """Four rooms in a ring: each wall is the one that stays closed in one of four trees."""
    closed = np.array([(~carve(3, 0.2, seed)).sum() for seed in range(2000)])
    assert set(closed) == {1, 2} and abs((closed == 2).mean() - 0.8) < 4 * np.sqrt(0.16 / 2000)
    which = sum(~carve(3, 0.0, seed) for seed in range(2000))
    assert which[1, 1] == 2000 and which.ravel()[[0, 2, 6, 8]].sum() == 0
    assert np.all(abs(which.ravel()[1::2] - 500) < 4 * np.sqrt(375))


def every_path(free, numbers, leg):
    """Probability of each (subgoals, path), by enumeration."""
    cells = np.flatnonzero(free).tolist()
    steps = {cell: search(free, cell) for cell in cells}
    found = collections.Counter()

    def go(stops, path, goal, left, chance):
        if path[-1] != goal:
            nearer = [x for x in beside(free, path[-1]) if steps[goal][x] < steps[goal][path[-1]]]
            for x in nearer:
                go(stops, (*path, x), goal, left, chance / len(nearer))
        elif left == 0:
            found[stops, path] += chance
        else:
            goals = [x for x in cells if 2 <= steps[goal][x] <= leg]
            for x in goals:
                go((*stops, x), path, x, left - 1, chance / len(goals))

    for k in numbers:
        for cell in cells:
            go((cell,), (cell,), cell, k - 1, 1 / len(numbers) / len(cells))
    return found


def test_paths_have_the_law_of_enumeration():
    law, num = every_path(RING, (2, 3), leg=4), 40_000
    assert abs(sum(law.values()) - 1) < 1e-12
    drawn = mazes.paths(survey(RING), (2, 3), 4, 9, 0, np.arange(num))
    seen = collections.Counter()
    for stops, tokens, given in zip(drawn.stops, drawn.tokens, drawn.given, strict=True):
        stops, path = (tuple(x[x != 9].tolist()) for x in (stops, tokens))
        assert stops == tuple(tokens[given].tolist())
        seen[stops, path] += 1
    assert set(seen) <= set(law)
    chi = sum((seen[key] - num * p) ** 2 / (num * p) for key, p in law.items())
    assert abs(chi - len(law)) < 5 * np.sqrt(2 * len(law))


def test_subgoals_are_given_and_never_next_to_each_other():
    found, maze = rows(config()), mazes.make_maze(config())
    at = np.arange(30)
    for tokens, length, given in zip(
        *(found[k] for k in ("tokens", "length", "given")), strict=True
    ):
        path = tokens[:length].tolist()
        assert all(b in beside(maze.free, a) for a, b in zip(path, path[1:], strict=False))
        places = np.flatnonzero(given & (at < length))
        assert places[0] == 0 and places[-1] == length - 1 and 2 <= len(places) <= 4
        assert np.diff(places).min() >= 2


def test_a_canvas_holds_the_same_paths_behind_a_prompt():
    plain, canvas = rows(config()), rows(config("maze_canvas"))
    assert data.describe(config("maze_canvas")).vocab_size == 50 == 1 + 49
    assert np.all(canvas["given"] == (np.arange(30) < 4)) and "length" not in canvas
    for row, tokens, n, given in zip(
        canvas["tokens"], plain["tokens"], plain["length"], plain["given"], strict=True
    ):
        stops = tokens[:n][given[:n]].tolist()
        assert row[:4].tolist() == stops + [49] * (4 - len(stops))
        assert row[4 : 4 + n].tolist() == tokens[:n].tolist() and np.all(row[4 + n :] == 49)


def test_splits_do_not_share_rows():
    a, b = (rows(config(), split)["tokens"] for split in ("validation", "test"))
    assert not np.array_equal(a, b)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"maze": (8, 0.3)}, "odd number"),
        ({"maze": (7, 1.5)}, "share in"),
        ({"clues": ()}, "number of subgoals"),
        ({"clues": (1, 3)}, "number of subgoals"),
        ({"seq_len": 10}, "use at least 15"),
    ],
)
def test_bad_values_are_refused(changes, words):
    with pytest.raises(data.DataError, match=words):
        data.describe(config(**changes))
