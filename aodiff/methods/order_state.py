"""What OrderGPT remembers between refreshes, and the rules by which it changes (on the host)."""

from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np

from aodiff.core import curriculum, spectral
from aodiff.core.orders import kendall_tau

FIRST_COUNT, FREEZE_COUNT = 15, 50  # exposures of the rarest pair before a graph, before the freeze
GATE = 0.97  # Kendall tau of student and teacher below which the teacher's order is used
STABLE_TAU, STABLE_REFRESHES, SPLIT_HALF_TAU = 0.95, 5, 0.9


@flax.struct.dataclass
class OrderState:
    """Everything the order depends on, as arrays, so that a resumed run repeats it bit for bit.

    Steps are -1 until they happen. `halves` of the evidence come from disjoint probe examples.
    """

    excess: Any  # (2 halves, n, n) float32, decayed sums of excess attention [target, source]
    count: Any  # (2 halves, n, n) float32, decayed exposures
    values: Any  # (n, V) float32, how often each unit had each value
    mark: Any  # (2,) float32: step and NLL of the last look for a plateau
    priority: Any  # (n,) float32, what orders are drawn from; larger is earlier
    order: Any  # (n,) int32, the learned order
    teacher: Any  # (n,) float32, oriented priorities of the last teacher
    logits: Any  # (n,) float32, the student's z-scored logits, averaged over refreshes
    student: Any  # OrderMLP parameters
    student_opt: Any  # their optimizer state
    start_step: Any  # () int32, end of P0
    order_step: Any  # () int32, first learned order
    freeze_step: Any  # () int32, the order is constant from here on
    doubts: Any  # () int32, see curriculum.orient
    stable: Any  # () int32, consecutive refreshes with an unchanged student order
    num_parts: Any  # () int32, pieces of the last graph
    history: Any  # (refreshes, n) int32, the order after each refresh
    history_step: Any  # (refreshes,) int32, the step of each refresh, -1 where unused

    @property
    def rarest(self) -> float:
        """Exposures of the pair seen least."""
        off = ~np.eye(self.count.shape[-1], dtype=bool)
        return float(self.count.sum(0)[off].min())


def fresh(n: int, vocab: int, refreshes: int, student: Any, student_opt: Any) -> OrderState:
    """The state of a run that has not begun; `refreshes` is the length of its history."""
    none = jnp.int32(-1)
    return OrderState(
        excess=jnp.zeros((2, n, n)),
        count=jnp.zeros((2, n, n)),
        values=jnp.zeros((n, vocab)),
        mark=jnp.array([0.0, jnp.inf]),
        priority=jnp.zeros(n),
        order=jnp.arange(n, dtype=jnp.int32),
        teacher=jnp.zeros(n),
        logits=jnp.zeros(n),
        student=student,
        student_opt=student_opt,
        start_step=none,
        order_step=none,
        freeze_step=none,
        doubts=jnp.int32(0),
        stable=jnp.int32(0),
        num_parts=jnp.int32(0),
        history=jnp.full((refreshes, n), -1, jnp.int32),
        history_step=jnp.full(refreshes, -1, jnp.int32),
    )


def maybe_start(
    state: OrderState,
    phases: curriculum.Curriculum,
    step: int,
    nll: float,
    gain: float,
    enough: float,
) -> OrderState:
    """P0 ends once context helps, or stops helping more, or at the latest step.

    Args:
      nll: any-order loss, nats per unit.
      gain: share of the marginal entropy that context saves.
      enough: the gain at which to start.

    Source: ordergpt.md section 10.
    """
    look = step - state.mark[0] >= phases.earliest
    # Training starts flat; only after some gain is a flat stretch a plateau.
    plateau = look and nll > 0.99 * state.mark[1] and gain >= 0.1 * enough
    if look:
        state = state.replace(mark=np.array([step, nll], np.float32))
    if (step >= phases.earliest and (gain >= enough or plateau)) or step >= phases.latest:
        state = state.replace(start_step=np.int32(step))
    return state


def add_evidence(
    state: OrderState, excess: np.ndarray, count: np.ndarray, decay: float
) -> OrderState:
    """Adds a probe's sums (2, n, n) to the older ones, both decayed alike."""
    decay = np.float32(decay)
    return state.replace(excess=decay * state.excess + excess, count=decay * state.count + count)


def direction(
    state: OrderState,
    line: spectral.Seriation,
    gap: float,
    error: float,
    phases: curriculum.Curriculum,
    step: int,
) -> tuple[OrderState, int]:
    """(new state, -1 to read the line from its other end); arguments as in `curriculum.orient`."""
    agreement = None
    if state.order_step >= 0:
        agreement = float((line.priority - line.priority.mean()) @ state.teacher)
    # The last refresh has no later one to wait for.
    patience = 1 if step >= phases.shift_end else 3
    sign, doubts = curriculum.orient(gap, error, agreement, int(state.doubts), patience)
    return state.replace(doubts=np.int32(doubts)), sign


def follow(
    state: OrderState,
    line: spectral.Seriation,
    halves: list[spectral.Seriation | None],
    logits: np.ndarray,
    phases: curriculum.Curriculum,
    step: int,
) -> tuple[OrderState, dict[str, float]]:
    """Takes over the order of the student, or of the teacher where they differ, and may freeze it.

    Args:
      line: the teacher's line, directed.
      halves: lines of the two halves of the evidence.
      logits: (n,) float32 of the student, averaged over refreshes.

    Returns:
      (new state, scalars to log).

    Source: ordergpt.md sections 9.4 and 10 (gate and freeze criterion).
    """
    teacher = line.priority.astype(np.float32)
    first = state.order_step < 0
    fidelity = kendall_tau(order_of(logits), order_of(teacher))
    unchanged = 0.0 if first else kendall_tau(order_of(logits), order_of(state.logits))
    stable = int(state.stable) + 1 if unchanged >= STABLE_TAU else 0
    reliable = abs(kendall_tau(halves[0].order, halves[1].order)) if all(halves) else 0.0
    settled = (
        step >= phases.freeze_from
        and stable >= STABLE_REFRESHES
        and line.num_parts == 1
        and fidelity >= GATE
        and reliable >= SPLIT_HALF_TAU
        and state.rarest >= FREEZE_COUNT
    )
    freeze = settled or step >= phases.shift_end
    chosen = logits if fidelity >= GATE else teacher
    priority = spectral.soft_rank(chosen.astype(np.float64)).astype(np.float32)
    order = order_of(priority)
    scalars = {
        "order/num_parts": line.num_parts,
        "order/lambda_2_over_3": line.lambda_2 / max(line.lambda_3, 1e-12),
        "order/min_count": state.rarest,
        "order/tau_student_teacher": fidelity,
        "order/tau_student_previous": unchanged,
        "order/tau_order_previous": 0.0 if first else kendall_tau(order, state.order),
        "order/tau_split_half": reliable,
        "order/frozen": float(freeze),
    }
    state = state.replace(
        priority=priority,
        order=order,
        teacher=teacher,
        logits=logits,
        order_step=np.int32(step) if first else state.order_step,
        freeze_step=np.int32(step if freeze else -1),
        stable=np.int32(stable),
        num_parts=np.int32(line.num_parts),
    )
    return state, scalars


def without_graph(state: OrderState, phases: curriculum.Curriculum, step: int) -> OrderState:
    """Keeps the order it has. The time limit of the freeze holds for this too, since later probes
    are not part of the equal compute; without any order, training stays uniform."""
    freeze = np.int32(step if step >= phases.shift_end else -1)
    return state.replace(num_parts=np.int32(0), freeze_step=freeze)


def record(state: OrderState, step: int) -> OrderState:
    """Notes the order in the history, while there is room."""
    row = int(np.sum(state.history_step >= 0))
    if row == len(state.history_step):
        return state
    return state.replace(
        history=_set(state.history, row, state.order),
        history_step=_set(state.history_step, row, step),
    )


def order_of(priority: np.ndarray) -> np.ndarray:
    """(n,) int32, units by falling priority; ties by number."""
    return np.argsort(-priority, kind="stable").astype(np.int32)


def _set(array: np.ndarray, row: int, value: Any) -> np.ndarray:
    array = array.copy()
    array[row] = value
    return array
