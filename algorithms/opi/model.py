"""Markov decision processes as pytrees, and the Bellman operators on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class TabularMDP:
  """A Markov decision process with a dense transition array.

  Attributes:
    reward: `[S, A]` expected reward. Entries of infeasible actions are not read.
    transition: `[S, A, S]` probability of each next state; rows sum to 1.
    discount: scalar in [0, 1).
    mask: `[S, A]` bool, True where the action is feasible; None when all are.
  """

  reward: jax.Array
  transition: jax.Array
  discount: jax.Array | float
  mask: jax.Array | None = None

  @property
  def num_states(self) -> int:
    return self.reward.shape[-2]

  @property
  def num_actions(self) -> int:
    return self.reward.shape[-1]

  @property
  def dtype(self) -> Any:
    return jnp.result_type(self.reward, self.transition, self.discount, float)


@struct.dataclass
class SparseMDP:
  """A Markov decision process that lists the successors of each state and action.

  Attributes:
    reward: `[S, A]` expected reward. Entries of infeasible actions are not read.
    next_state: `[S, A, K]` int32 successors.
    probability: `[S, A, K]` their probabilities; pad short lists with probability 0.
    discount: scalar in [0, 1).
    mask: `[S, A]` bool, True where the action is feasible; None when all are.
  """

  reward: jax.Array
  next_state: jax.Array
  probability: jax.Array
  discount: jax.Array | float
  mask: jax.Array | None = None

  @property
  def num_states(self) -> int:
    return self.reward.shape[-2]

  @property
  def num_actions(self) -> int:
    return self.reward.shape[-1]

  @property
  def dtype(self) -> Any:
    return jnp.result_type(self.reward, self.probability, self.discount, float)


@struct.dataclass
class OperatorMDP:
  """A Markov decision process known through its two Bellman operators only.

  For models whose transition has structure (an exogenous shock, a convolution) that a product of
  small matrices uses and an array of all successors hides. Parameters bound to the callables by
  `jax.tree_util.Partial` are traced and differentiable; those of a closure are constants and must
  not be traced.

  Attributes:
    backup: `v [S] -> q [S, A]`, `q = r + discount * E[v(next)]`; -inf where infeasible.
    policy_backup: `(policy [S], v [S]) -> [S]`, the entries of `backup` that the policy chooses,
      affine in v, for the price of one action.
    discount: scalar in [0, 1), the modulus of both operators.
    num_states: S, static.
    num_actions: A, static.
    dtype: type of values, static.
  """

  backup: Callable[[jax.Array], jax.Array]
  policy_backup: Callable[[jax.Array, jax.Array], jax.Array]
  discount: jax.Array | float
  num_states: int = struct.field(pytree_node=False)
  num_actions: int = struct.field(pytree_node=False)
  dtype: Any = struct.field(pytree_node=False, default=None)

  def __post_init__(self):
    # A plain function is not a pytree; Partial makes it one without leaves.
    for name in ("backup", "policy_backup"):
      function = getattr(self, name)
      if callable(function) and not isinstance(function, jax.tree_util.Partial):
        object.__setattr__(self, name, jax.tree_util.Partial(function))
    if self.dtype is None:
      object.__setattr__(self, "dtype", jnp.result_type(float))


MDP = TabularMDP | SparseMDP | OperatorMDP


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
  """`a @ b` in full precision: accelerators round float32 factors to fewer bits by default."""
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def bellman_q(mdp: MDP, value: jax.Array) -> jax.Array:
  """`q(s, a) = r(s, a) + discount * E[v(s') | s, a]`, -inf where an action is infeasible.

  The rows of `mdp` may be a part of the states, as on one device of many.

  Args:
    mdp: the model.
    value: `[S]`, all states.

  Returns:
    `[rows, A]`.
  """
  if isinstance(mdp, OperatorMDP):
    return mdp.backup(value)
  if isinstance(mdp, SparseMDP):
    expected = jnp.sum(mdp.probability * value[mdp.next_state], axis=-1)
  else:
    expected = matmul(mdp.transition, value)
  q = mdp.reward + mdp.discount * expected
  return q if mdp.mask is None else jnp.where(mdp.mask, q, -jnp.inf)


def greedy(q: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The greedy policy of `q [S, A]` (first action on ties, int32 `[S]`) and its value `[S]`."""
  return jnp.argmax(q, axis=-1).astype(jnp.int32), jnp.max(q, axis=-1)


def policy_rows(mdp: MDP, policy: jax.Array) -> tuple[jax.Array, Callable[..., jax.Array]]:
  """The Markov reward process of a policy: one row a state instead of A.

  Args:
    mdp: the model; its rows may be a part of the states.
    policy: `[rows]` feasible actions.

  Returns:
    `(reward [rows], expect)` with `expect(v [S]) = discount * E[v(s') | s, policy(s)]`, `[rows]`,
    which is linear in v.
  """
  if isinstance(mdp, OperatorMDP):
    reward = mdp.policy_backup(policy, jnp.zeros(mdp.num_states, mdp.dtype))
    return reward, lambda v: mdp.policy_backup(policy, v) - reward
  reward = jnp.take_along_axis(mdp.reward, policy[:, None], axis=1)[:, 0].astype(mdp.dtype)
  chosen = policy[:, None, None]
  if isinstance(mdp, SparseMDP):
    successor = jnp.take_along_axis(mdp.next_state, chosen, axis=1)[:, 0]
    probability = jnp.take_along_axis(mdp.probability, chosen, axis=1)[:, 0]
    return reward, lambda v: mdp.discount * jnp.sum(probability * v[successor], axis=-1)
  transition = jnp.take_along_axis(mdp.transition, chosen, axis=1)[:, 0]
  return reward, lambda v: mdp.discount * matmul(transition, v)


def policy_backup(mdp: MDP, policy: jax.Array, value: jax.Array) -> jax.Array:
  """`(T_mu v)(s) = r(s, mu(s)) + discount * E[v(s') | s, mu(s)]`, `[S]`.

  Only the chosen rows are touched, so that a sweep costs an A-th of a full backup.
  """
  reward, expect = policy_rows(mdp, policy)
  return reward + expect(value)


def check_mdp(mdp: MDP) -> None:
  """Refuses a model that no solver can make sense of; looks at values, so not under jit.

  Raises:
    ValueError: a discount outside [0, 1), shapes or types that do not fit, a state without a
      feasible action, a reward that is not finite, a negative probability, a successor out of
      range, or a row of probabilities off 1 by more than 1e-6 (in float32 also by the rounding
      of as many terms). The first offending state and action are named.
  """
  if not isinstance(mdp, MDP):
    raise ValueError(
      f"mdp is a {type(mdp).__name__}; expected a TabularMDP, a SparseMDP or an OperatorMDP"
    )
  if jnp.ndim(mdp.discount) or not 0 <= float(mdp.discount) < 1:
    raise ValueError(
      f"discount = {mdp.discount}; expected one number in [0, 1). Undiscounted models need "
      "absorbing states and proper policies, which this solver does not assume"
    )
  if not jnp.asarray(mdp.discount, mdp.dtype) < 1:
    raise ValueError(
      f"discount = {mdp.discount} is 1 when rounded to {jnp.dtype(mdp.dtype).name}; enable float64 "
      "(jax_enable_x64) or lower it"
    )
  if isinstance(mdp, OperatorMDP):
    q = mdp.backup(jnp.zeros(mdp.num_states, mdp.dtype))
    if q.shape != (mdp.num_states, mdp.num_actions):
      raise ValueError(
        f"backup returns shape {q.shape}; expected [num_states, num_actions] = "
        f"[{mdp.num_states}, {mdp.num_actions}]"
      )
    swept = mdp.policy_backup(greedy(q)[0], jnp.zeros(mdp.num_states, mdp.dtype))
    if swept.shape != (mdp.num_states,):
      raise ValueError(
        f"policy_backup returns shape {swept.shape}; expected [num_states] = [{mdp.num_states}]"
      )
    for name, found in (("backup", q), ("policy_backup", swept)):
      if found.dtype != mdp.dtype:
        raise ValueError(
          f"{name} returns {found.dtype}; expected the model's dtype, {jnp.dtype(mdp.dtype).name}"
        )
    _refuse(jnp.isnan(q) | (q == jnp.inf), q, "backup(0)", "a number, or -inf if infeasible")
    _check_feasible(q > -jnp.inf)
    return
  _check_shapes(mdp)
  mask = jnp.ones(mdp.reward.shape, bool) if mdp.mask is None else mdp.mask
  _check_feasible(mask)
  _refuse(
    mask & ~jnp.isfinite(mdp.reward),
    mdp.reward,
    "reward",
    "a finite number; mark infeasible actions by mask=False, not by -inf",
  )
  rows = mdp.probability if isinstance(mdp, SparseMDP) else mdp.transition
  _refuse(mask[..., None] & ~(rows >= 0), rows, "probability", "0 or more")
  if isinstance(mdp, SparseMDP):
    outside = (mdp.next_state < 0) | (mdp.next_state >= mdp.num_states)
    _refuse(outside, mdp.next_state, "next_state", f"a state, 0..{mdp.num_states - 1}")
  total = rows.sum(axis=-1)
  eps = float(jnp.finfo(jnp.result_type(rows.dtype, float)).eps)
  tolerance = max(1e-6, 2 * eps * rows.shape[-1] ** 0.5)
  _refuse(mask & ~(abs(total - 1) <= tolerance), total, "sum of probabilities", "1")


def is_concrete(tree: Any) -> bool:
  """Whether arrays of a pytree, and what is computed from them, have values now to be checked."""
  try:
    # Asking a traced array where it lies is an error; an array over many hosts answers. Under jit
    # a new array is traced even if all of the tree is not, and so is what is computed from it.
    for leaf in [*jax.tree.leaves(tree), jnp.zeros(())]:
      _ = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
  except jax.errors.ConcretizationTypeError:
    return False
  return True


def _check_shapes(mdp: TabularMDP | SparseMDP) -> None:
  shape = jnp.shape(mdp.reward)
  if len(shape) != 2 or 0 in shape:
    raise ValueError(f"reward has shape {shape}; expected [S, A] with S and A at least 1")
  if mdp.mask is not None and (mdp.mask.shape != shape or mdp.mask.dtype != bool):
    raise ValueError(
      f"mask is {mdp.mask.dtype} of shape {mdp.mask.shape}; expected bool of reward's shape {shape}"
    )
  if isinstance(mdp, TabularMDP):
    if mdp.transition.shape != (*shape, shape[0]):
      raise ValueError(
        f"transition has shape {mdp.transition.shape}; expected [S, A, S] = {(*shape, shape[0])}"
      )
    return
  if mdp.probability.ndim != 3 or mdp.probability.shape[:2] != shape:
    raise ValueError(
      f"probability has shape {mdp.probability.shape}; expected [S, A, K] with [S, A] = {shape}"
    )
  if mdp.next_state.shape != mdp.probability.shape:
    raise ValueError(
      f"next_state has shape {mdp.next_state.shape}; expected probability's, "
      f"{mdp.probability.shape}"
    )
  if not jnp.issubdtype(mdp.next_state.dtype, jnp.integer):
    raise ValueError(f"next_state is {mdp.next_state.dtype}; expected int32 numbers of states")


def _check_feasible(mask: jax.Array) -> None:
  empty = ~mask.any(axis=-1)
  if empty.any():
    raise ValueError(
      f"state {int(jnp.argmax(empty))} has no feasible action; expected at least one in each "
      "state. Give dead ends an action that stays, with reward 0"
    )


def _refuse(bad: jax.Array, values: jax.Array, name: str, expected: str) -> None:
  if not bad.any():
    return
  count = int(bad.sum())
  index = []
  while bad.ndim:
    # One axis after the other: a flat index into 1e8 states does not fit 32 bits.
    index.append(int(jnp.argmax(bad.reshape(bad.shape[0], -1).any(axis=1))))
    bad = bad[index[-1]]
  where = ", ".join(
    f"{axis} {i}" for axis, i in zip(("state", "action", "successor"), index, strict=False)
  )
  raise ValueError(
    f"{name} of {where} is {values[tuple(index)]}; expected {expected} ({count} such entries)"
  )
