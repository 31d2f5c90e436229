"""In which order a program was written: one part after the other, or back and forth between them.

A program is a tree of statements; each of its Python tokens was revealed at a step, and belongs to
one node. Four numbers say how the children of a node were written. Source: arXiv 2607.26504;
flexmdm.md section 11.
"""

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Callable, Iterator

import numpy as np

DRAWS = 32  # random orders behind the null baseline
LONGEST = 100  # lines of a part of a text that is tried as a program
TESTS = "Generated Tests"
SCORES = ("cbc", "rub", "rub_plus", "obw")
BODIES = ("body", "handlers", "orelse", "finalbody", "cases")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMPOUND = (
    *DEFINITIONS,
    *(ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith),
    *(ast.Try, ast.TryStar, ast.Match),
)


@dataclasses.dataclass(eq=False)
class Node:
    """A statement, the module, or the tests at its end.

    name: of a function or class, else the kind. start, end: characters. children: in order.
    tokens: indices of the Python tokens that belong to it and to no child.
    """

    name: str
    start: int
    end: int
    children: list["Node"] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)

    def walk(self) -> Iterator["Node"]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def all_tokens(self) -> list[int]:
        return [t for node in self.walk() for t in node.tokens]


@dataclasses.dataclass(frozen=True)
class Program:
    """A tree, and the spans (first character, one past the last) of its Python tokens."""

    root: Node
    spans: list[tuple[int, int]]

    def steps(self, characters: np.ndarray) -> np.ndarray:
        """Step of each token: that of its last character to come; `characters` holds theirs."""
        return np.array([characters[first:last].max() for first, last in self.spans])


def program(text: str) -> tuple[int, str] | None:
    """Where in a text the program is and what it is; None if there is none.

    Tried are the whole text, a fenced block, what comes before a closing fence, and the longest run
    of at most `LONGEST` lines that can be parsed.
    """
    tries = [(0, text)]
    if block := re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL):
        tries.append((block.start(1), block[1]))
    if "```" in text:
        tries.append((0, text[: text.index("```")]))
    for start, source in tries:
        if source.strip() and _parse(source) is not None:
            return start, source
    lines = text.splitlines(keepends=True)
    starts = np.cumsum([0, *map(len, lines)]).tolist()
    for size in range(min(len(lines), LONGEST), 0, -1):
        for first in range(len(lines) - size + 1):
            source = "".join(lines[first : first + size])
            if source.strip() and _parse(source) is not None:
                return starts[first], source
    return None


def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def tree(source: str) -> Program:
    """The tree of a program that can be parsed, with its tokens."""
    lines = source.splitlines(keepends=True) + [""]
    starts = np.cumsum([0, *map(len, lines)]).tolist()

    def at(line: int, column: int) -> int:  # the columns of `ast` are bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def node(statement: ast.stmt) -> Node:
        first = statement
        if getattr(statement, "decorator_list", None):
            first = statement.decorator_list[0]
        name = getattr(statement, "name", type(statement).__name__)
        end = at(statement.end_lineno, statement.end_col_offset)
        found = Node(name, at(first.lineno, first.col_offset), end)
        found.children = [node(s) for s in parts(statement)]
        return found

    module = ast.parse(source)
    root = Node("module", 0, len(source), [node(s) for s in parts(module)])
    if (first := _first_test(parts(module))) is not None:
        tests = root.children[first:]
        group = Node(TESTS, tests[0].start, tests[-1].end, tests)
        root.children = [*root.children[:first], group]
    spans = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        first, last = (starts[line - 1] + column for line, column in (token.start, token.end))
        last = min(last, len(source))
        if first < last:
            _owner(root, first, last).tokens.append(len(spans))
            spans.append((first, last))
    return Program(root, spans)


def parts(node: ast.AST) -> list[ast.stmt]:
    """The statements directly inside a statement or module; a docstring is none."""
    if not isinstance(node, (ast.Module, ast.ExceptHandler, ast.match_case, *COMPOUND)):
        return []
    inner = [x for field in BODIES for x in getattr(node, field, [])]
    documented = isinstance(node, (ast.Module, *DEFINITIONS))
    if documented and ast.get_docstring(node, clean=False) is not None:
        inner = inner[1:]
    held = (ast.ExceptHandler, ast.match_case)  # their statements count, they do not
    return [x for part in inner for x in (parts(part) if isinstance(part, held) else [part])]


def _first_test(statements: list[ast.stmt]) -> int | None:
    """The first statement of the tests behind the definitions of a module."""
    defined = False
    for i, statement in enumerate(statements):
        if isinstance(statement, DEFINITIONS):
            defined = True
        elif defined and not isinstance(statement, ast.Import | ast.ImportFrom):
            if any(map(_is_test, statements[i:])):
                return i
    return None


def _is_test(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        guard = any(
            isinstance(x, ast.Name) and x.id == "__name__" for x in ast.walk(statement.test)
        )
        return guard or any(map(_is_test, parts(statement)))
    bare = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return bare or isinstance(statement, ast.Assert)


def _owner(node: Node, first: int, last: int) -> Node:
    """The deepest node that shares characters with a token."""
    inside = [c for c in node.children if c.start < last and first < c.end]
    return _owner(min(inside, key=lambda c: c.end - c.start), first, last) if inside else node


# ---- scores -------------------------------------------------------------------------------------


def node_scores(children: list[np.ndarray]) -> dict[str, float]:
    """How the children of a node were written, given the steps of the tokens of each.

    cbc: share of children begun when the first is complete. rub: share of those that were left and
    taken up again. rub_plus: how often, up to twice. obw: largest share of them open at once.
    """
    k = len(children)
    if k == 1:
        return dict.fromkeys(SCORES, 1.0)
    steps = [np.unique(s) for s in children]
    begun = [s for s in steps if len(s)]
    if not begun:
        return dict.fromkeys(SCORES, 0.0)
    first_done = min(s[-1] for s in begun)
    entries = np.unique(np.concatenate(begun))
    returns, visits = 0, 0.0
    for i, own in enumerate(steps):
        if not len(own):
            continue
        others = [s for j, s in enumerate(steps) if j != i]
        returns += any(np.any((s > own[0]) & (s < own[-1])) for s in others)
        mine = np.isin(entries, own)
        runs = int(mine[0]) + int(np.sum(mine[1:] & ~mine[:-1]))
        visits += min(max(runs - 1, 0), 2) / 2
    widest = max(sum(s[0] <= e < s[-1] for s in begun) for e in entries)
    return {
        "cbc": sum(s[0] <= first_done for s in begun) / k,
        "rub": returns / k,
        "rub_plus": visits / k,
        "obw": max(widest, 1) / k,
    }


# Which nodes of a program are looked at: all, all but the tests at its end, those of one function.
VARIANTS: dict[str, Callable[[Node, str], Node | None]] = {
    "all": lambda root, entry: root,
    "code_only": lambda root, entry: _without_tests(root),
    "entry_only": lambda root, entry: next((n for n in root.walk() if n.name == entry), None),
}


def _without_tests(root: Node) -> Node:
    return dataclasses.replace(root, children=[c for c in root.children if c.name != TESTS])


def scores(
    found: Program, steps: np.ndarray, variant: str = "code_only", entry: str = ""
) -> dict[str, float]:
    """Means over the nodes of a program, {} if it has none of a kind.

    Args:
      steps: (number of tokens,) step at which each token was written.
      variant: a key of `VARIANTS`, the last with the name of a function, `entry`.

    Returns:
      "split/<score>" of the nodes with two children or more, "overall/<score>" of all with any:
      those with one child have 1 whatever happens.
    """
    root = VARIANTS[variant](found.root, entry)
    levels = {"split": [], "overall": []}
    for node in root.walk() if root else ():
        if node.children:
            one = node_scores([steps[c.all_tokens()] for c in node.children])
            levels["overall"].append(one)
            if len(node.children) > 1:
                levels["split"].append(one)
    return {
        f"{level}/{name}": float(np.mean([s[name] for s in nodes]))
        for level, nodes in levels.items()
        if nodes
        for name in SCORES
    }


def nulls(found: Program, seed: int = 0, **options) -> dict[str, dict[str, float]]:
    """`scores` of the same program written from left to right, and in uniform orders, by name."""
    num, rng = len(found.spans), np.random.default_rng(seed)
    drawn = [scores(found, rng.permutation(num), **options) for _ in range(DRAWS)]
    mean = {name: float(np.mean([d[name] for d in drawn])) for name in drawn[0]}
    return {"left_to_right": scores(found, np.arange(num), **options), "random": mean}


def character_steps(lengths: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Step of each character of a text of pieces, each of which was revealed at one step.

    Args:
      lengths: characters that each piece adds; one that adds none is a part of the last character.
      steps: step of each piece.
    """
    found = []
    for length, step in zip(np.asarray(lengths).tolist(), np.asarray(steps).tolist(), strict=True):
        if length == 0 and found:
            found[-1] = max(found[-1], step)
        found += [step] * length
    return np.array(found, np.int64)
