"""Optimistic policy iteration with linear values: `v = Phi theta`, fitted on sampled states.

  theta' = argmin sum_{i in D} (phi(i)^T theta - (T_mu^m T^(H-1) Phi theta_k)(i))^2

with mu greedy for `T^(H-1) Phi theta_k` (Winnicki, Lubars, Livesay and Srikant, arXiv 2109.13419).
The fit may stretch what the backups contract. By delta, its norm in the largest entry,

  delta = || Phi (Phi_D^T Phi_D)^-1 Phi_D^T ||_inf,   g^(m+H-1) delta < 1

is enough for boundedness; the exact form of the condition is inferred and tested numerically.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from algorithms.opi.model import MDP, bellman_q, greedy, is_concrete, matmul, policy_rows


@struct.dataclass
class LinearResult:
  """A run of `linear_run`.

  Attributes:
    theta: `[d]` last weights.
    value_norms: `[n]` largest `|Phi theta|` after each iteration.
    delta: norm of the fit.
    product: `g^(m+H-1) delta`; below 1 the iteration is bounded.
    diverged: whether the weights are no longer finite or 1e6 times the largest value that any
      policy has.
  """

  theta: jax.Array
  value_norms: jax.Array
  delta: jax.Array
  product: jax.Array
  diverged: jax.Array


def contraction_product(
  phi: jax.Array,
  sampled: jax.Array,
  discount: jax.Array | float,
  num_sweeps: int,
  lookahead: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """`(delta, g^(m+H-1) delta)` of features `phi [S, d]` fitted on states `sampled [n]`.

  Raises:
    ValueError: shapes, states or counts that make no sense, or features that the sampled states do
      not tell apart.
  """
  _check(phi, sampled, num_sweeps, lookahead)
  phi = phi.astype(jnp.result_type(phi, float))
  delta = jnp.max(jnp.sum(abs(matmul(phi, jnp.linalg.pinv(phi[sampled]))), axis=1))
  return delta, discount ** (num_sweeps + lookahead - 1) * delta


def linear_step(
  mdp: MDP,
  phi: jax.Array,
  sampled: jax.Array,
  theta: jax.Array,
  num_sweeps: int,
  lookahead: int = 1,
  *,
  gradient_steps: int | None = None,
  step_size: float = 0.1,
) -> jax.Array:
  """One iteration.

  Args:
    mdp: the model.
    phi: `[S, d]` features.
    sampled: `[n]` states that are fitted.
    theta: `[d]` weights.
    num_sweeps: m, length of the return.
    lookahead: H, backups of the greedy step.
    gradient_steps: gradient steps on the mean of half the squared errors from theta, instead of
      the least-squares solution when None.
    step_size: of a gradient step.

  Returns:
    `[d]`.

  Raises:
    ValueError: see `contraction_product`; also no gradient step or a step size that is not
      positive.
  """
  _check(phi, sampled, num_sweeps, lookahead)
  _check_gradient(gradient_steps, step_size)
  phi, theta = _cast(mdp, phi, theta)
  return _step(mdp, phi, sampled, theta, num_sweeps, lookahead, gradient_steps, step_size)


def linear_run(
  mdp: MDP,
  phi: jax.Array,
  sampled: jax.Array,
  theta: jax.Array,
  num_sweeps: int,
  lookahead: int,
  num_iterations: int,
  *,
  gradient_steps: int | None = None,
  step_size: float = 0.1,
) -> LinearResult:
  """`num_iterations` (1 or more) of `linear_step`; same arguments and errors."""
  _check_gradient(gradient_steps, step_size)
  if num_iterations < 1:
    raise ValueError(f"num_iterations = {num_iterations}; expected 1 or more")
  delta, product = contraction_product(phi, sampled, mdp.discount, num_sweeps, lookahead)
  phi, theta = _cast(mdp, phi, theta)

  def body(theta: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
    theta = _step(mdp, phi, sampled, theta, num_sweeps, lookahead, gradient_steps, step_size)
    return theta, jnp.max(abs(matmul(phi, theta)))

  theta, norms = jax.lax.scan(body, theta, None, length=num_iterations)
  q = bellman_q(mdp, jnp.zeros(mdp.num_states, mdp.dtype))
  largest = jnp.max(jnp.where(jnp.isfinite(q), abs(q), 0)) / (1 - mdp.discount)
  return LinearResult(theta, norms, delta, product, ~(norms[-1] <= 1e6 * (1 + largest)))


def _step(
  mdp: MDP,
  phi: jax.Array,
  sampled: jax.Array,
  theta: jax.Array,
  num_sweeps: int,
  lookahead: int,
  gradient_steps: int | None,
  step_size: float,
) -> jax.Array:
  value = matmul(phi, theta)
  for _ in range(lookahead - 1):
    value = greedy(bellman_q(mdp, value))[1]
  policy, value = greedy(bellman_q(mdp, value))
  reward, expect = policy_rows(mdp, policy)
  value = jax.lax.fori_loop(0, num_sweeps - 1, lambda _, v: reward + expect(v), value)
  features, target = phi[sampled], value[sampled]
  if gradient_steps is None:
    return jnp.linalg.lstsq(features, target)[0]

  def descend(_: int, theta: jax.Array) -> jax.Array:
    error = matmul(features, theta) - target
    return theta - step_size / sampled.size * matmul(features.T, error)

  return jax.lax.fori_loop(0, gradient_steps, descend, theta)


def _cast(mdp: MDP, phi: jax.Array, theta: jax.Array) -> tuple[jax.Array, jax.Array]:
  dtype = jnp.result_type(mdp.dtype, phi)
  return jnp.asarray(phi, dtype), jnp.asarray(theta, dtype)


def _check_gradient(gradient_steps: int | None, step_size: float) -> None:
  if gradient_steps is not None and (gradient_steps < 1 or not step_size > 0):
    raise ValueError(
      f"gradient_steps = {gradient_steps}, step_size = {step_size}; expected 1 or more steps of a "
      "positive size"
    )


def _check(phi: jax.Array, sampled: jax.Array, num_sweeps: int, lookahead: int) -> None:
  if phi.ndim != 2 or sampled.ndim != 1 or not jnp.issubdtype(sampled.dtype, jnp.integer):
    raise ValueError(
      f"phi has shape {phi.shape}, sampled is {sampled.dtype} of shape {sampled.shape}; expected "
      "[S, d] features and [n] integer states"
    )
  if num_sweeps < 1 or lookahead < 1:
    raise ValueError(
      f"num_sweeps = {num_sweeps}, lookahead = {lookahead}; expected 1 or more of both"
    )
  if not is_concrete((phi, sampled)):
    return
  states = np.asarray(sampled)
  bad = (states < 0) | (states >= phi.shape[0])
  if bad.any():
    raise ValueError(
      f"sampled[{int(np.argmax(bad))}] = {states[np.argmax(bad)]}; expected a state, "
      f"0..{phi.shape[0] - 1}"
    )
  rank = int(np.linalg.matrix_rank(np.asarray(phi)[states]))
  if rank < phi.shape[1]:
    raise ValueError(
      f"the features of the {states.size} sampled states have rank {rank}; expected "
      f"{phi.shape[1]}, one for each feature. Sample more states or drop features"
    )
