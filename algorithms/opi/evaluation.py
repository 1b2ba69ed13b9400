"""Exact evaluation of a policy: the linear system `v = r_mu + g P_mu v`, without its matrix."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from algorithms.opi.model import MDP, check_mdp, is_concrete, policy_rows

METHODS = ("krylov", "dense", "iterate")

# Products with P_mu between two looks at the residual: bicgstab makes two an iteration.
_KRYLOV_ITERATIONS = 25
_SWEEPS = 50


@struct.dataclass
class Evaluation:
  """A policy's value.

  Attributes:
    value: `[S]`.
    residual: largest `|T_mu v - v|`; the value's error is at most `residual / (1 - discount)`.
    num_iterations: rounds of "krylov", sweeps of "iterate", 1 for "dense".
    converged: whether the residual is within the tolerance.
  """

  value: jax.Array
  residual: jax.Array
  num_iterations: jax.Array
  converged: jax.Array


def evaluate_policy(
  mdp: MDP,
  policy: jax.Array,
  *,
  method: str = "krylov",
  tolerance: float | None = None,
  max_iterations: int | None = None,
) -> Evaluation:
  """Solves `v = T_mu v`.

  - "krylov": bicgstab on products with `P_mu`, restarted, with sweeps between. A Krylov method
    alone breaks down on the chains and rings that deterministic models are made of (its inner
    products become 0); a round that does not lower the residual is thrown away, and the sweeps
    converge whatever happened.
  - "dense": an LU solve; O(S^3) time, O(S^2) memory.
  - "iterate": sweeps `v <- T_mu v` only.

  Args:
    mdp: the model.
    policy: `[S]` feasible actions.
    method: one of METHODS.
    tolerance: accepted residual; None is what the value's type can resolve.
    max_iterations: cap of rounds or sweeps; None is the number after which sweeps alone must have
      converged. When it is hit, `converged` is False, with a warning outside jit.

  Returns:
    An `Evaluation`.

  Raises:
    ValueError: a method, tolerance, cap or policy that makes no sense, or a model that `check_mdp`
      refuses (only outside jit).
  """
  if method not in METHODS:
    raise ValueError(f"method = {method!r}; expected one of {', '.join(METHODS)}")
  if tolerance is not None and not tolerance > 0:
    raise ValueError(f"tolerance = {tolerance}; expected a positive number")
  if max_iterations is not None and max_iterations < 1:
    raise ValueError(f"max_iterations = {max_iterations}; expected 1 or more")
  policy = jnp.asarray(policy)
  concrete = is_concrete((mdp, policy))
  if concrete:
    check_mdp(mdp)
    _check_policy(mdp, policy)
  result = _evaluate(mdp, policy, method, tolerance, max_iterations)
  if concrete and is_concrete(result) and not result.converged:
    warnings.warn(
      f"evaluate_policy stopped at residual {float(result.residual):.3g} after "
      f"{int(result.num_iterations)} iterations, above the tolerance; raise max_iterations "
      f"(now {max_iterations}) or tolerance (now {tolerance})",
      stacklevel=2,
    )
  return result


@functools.partial(jax.jit, static_argnames=("method", "tolerance", "max_iterations"))
def _evaluate(
  mdp: MDP, policy: jax.Array, method: str, tolerance: float | None, max_iterations: int | None
) -> Evaluation:
  reward, expect = policy_rows(mdp, policy)
  if method == "dense":
    identity = jnp.eye(mdp.num_states, dtype=reward.dtype)
    matrix = identity - jax.vmap(expect, in_axes=1, out_axes=1)(identity)
    value = jnp.linalg.solve(matrix, reward)
    residual = jnp.max(abs(reward + expect(value) - value))
    limit = _limit(value, tolerance)
    return Evaluation(value, residual, jnp.int32(1), residual <= limit)
  return solve_linear(
    expect, reward, mdp.discount, tolerance, max_iterations, krylov=method == "krylov"
  )


def solve_linear(
  linear: Callable[[jax.Array], jax.Array],
  constant: jax.Array,
  modulus: jax.Array | float,
  tolerance: float | None = None,
  max_iterations: int | None = None,
  *,
  start: jax.Array | None = None,
  krylov: bool = True,
) -> Evaluation:
  """Solves `x = constant + linear(x)` for a linear map of modulus below 1; see `evaluate_policy`.

  The map has to contract in the largest entry or, as the transpose of such a map does, in the sum
  of entries' sizes.
  """
  sweeps = _SWEEPS if krylov else 1

  def residual(x: jax.Array) -> jax.Array:
    return constant + linear(x) - x

  def size(x: jax.Array) -> jax.Array:
    return jnp.max(abs(x))

  start = jnp.zeros_like(constant) if start is None else start
  first = size(residual(start))
  if max_iterations is None:
    # A sweep multiplies the residual by `modulus` in the norm it contracts in; the sum of S
    # entries is at most S times the largest.
    aim = jnp.finfo(constant.dtype).eps if tolerance is None else tolerance / jnp.maximum(first, 1)
    rate = jnp.log(jnp.maximum(modulus, 1e-6)) * sweeps
    max_iterations = 2 + jnp.ceil(jnp.log(aim / constant.size) / rate).astype(jnp.int32)

  def unfinished(carry: tuple) -> jax.Array:
    x, error, count = carry
    return (error > _limit(x, tolerance)) & (count < max_iterations)

  def body(carry: tuple) -> tuple:
    x, error, count = carry
    if krylov:
      step, _ = jax.scipy.sparse.linalg.bicgstab(
        lambda y: y - linear(y), residual(x), tol=1e-6, atol=0.0, maxiter=_KRYLOV_ITERATIONS
      )
      trial = x + step
      trial_error = size(residual(trial))
      # NaN compares false: a breakdown is thrown away with everything that does not help.
      x = jnp.where(trial_error < error, trial, x)
    x = jax.lax.fori_loop(0, sweeps, lambda _, y: constant + linear(y), x)
    return x, size(residual(x)), count + 1

  x, error, count = jax.lax.while_loop(unfinished, body, (start, first, jnp.int32(0)))
  return Evaluation(x, error, count, error <= _limit(x, tolerance))


def _limit(value: jax.Array, tolerance: float | None) -> jax.Array:
  # What rounding leaves of a residual: a few units in the last place of the largest value.
  floor = 16 * jnp.finfo(value.dtype).eps * jnp.max(abs(value))
  return floor if tolerance is None else jnp.asarray(tolerance, value.dtype)


def _check_policy(mdp: MDP, policy: jax.Array) -> None:
  if policy.shape != (mdp.num_states,) or not jnp.issubdtype(policy.dtype, jnp.integer):
    raise ValueError(
      f"policy is {policy.dtype} of shape {policy.shape}; expected an integer action for each of "
      f"{mdp.num_states} states"
    )
  bad = (policy < 0) | (policy >= mdp.num_actions)
  if not bad.any() and getattr(mdp, "mask", None) is not None:
    bad = ~jnp.take_along_axis(mdp.mask, policy[:, None], axis=1)[:, 0]
  if bad.any():
    state = int(jnp.argmax(bad))
    raise ValueError(
      f"policy chooses action {int(policy[state])} in state {state}; expected a feasible action, "
      f"0..{mdp.num_actions - 1}"
    )
