"""Optimistic policy iteration with a known model: a few sweeps of evaluation, then greedy again."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from algorithms.opi.evaluation import solve_linear
from algorithms.opi.model import (
  MDP,
  OperatorMDP,
  SparseMDP,
  bellman_q,
  check_mdp,
  greedy,
  is_concrete,
  policy_backup,
  policy_rows,
)

STOPPING = ("span", "norm")


@dataclasses.dataclass(frozen=True)
class OPIConfig:
  """How much evaluation, how much lookahead, and when to stop.

  With `w = T^(H-1) v` and mu greedy for w, an iteration sets `v <- T_mu^m w`, where `T_mu w = T w`
  is one of the m sweeps.

  Attributes:
    num_sweeps: m, 1 or more. 1 is value iteration; a tuple is a schedule m_0, m_1, ... whose last
      entry stays; None evaluates exactly, which is Howard's policy iteration.
    lookahead: H, 1 or more backups before the greedy step.
    lam: weight of lambda policy iteration in [0, 1]: `v <- (1 - lam) sum_l lam^l T_mu^(l+1) w`,
      the sum cut after m terms, the last with the weight of all later ones. None is 1.
    epsilon: the policy returned loses at most this much value in any state. None is 1e-6, or what
      the values' type resolves where that is more; a number that it does not resolve is an error.
    stopping: "span" (Puterman, section 6.6) or "norm" of `T w - w`.
    max_iterations: cap on greedy steps; None is a bound that exact arithmetic cannot reach.

  Raises:
    ValueError: a field outside its range.
  """

  num_sweeps: int | Sequence[int] | None = 20
  lookahead: int = 1
  lam: float | None = None
  epsilon: float | None = None
  stopping: str = "span"
  max_iterations: int | None = None

  def __post_init__(self):
    if isinstance(self.num_sweeps, Sequence):
      object.__setattr__(self, "num_sweeps", tuple(self.num_sweeps))
    schedule = self.num_sweeps if isinstance(self.num_sweeps, tuple) else (self.num_sweeps,)
    if self.num_sweeps is not None and not (schedule and all(_is_count(m) for m in schedule)):
      raise ValueError(
        f"num_sweeps = {self.num_sweeps!r}; expected integers of 1 (value iteration) or more, or "
        "None for exact evaluation"
      )
    if not _is_count(self.lookahead):
      raise ValueError(f"lookahead = {self.lookahead!r}; expected an integer of 1 or more")
    if self.lam is not None and not 0 <= self.lam <= 1:
      raise ValueError(f"lam = {self.lam}; expected a weight in [0, 1]")
    if self.epsilon is not None and not 0 < self.epsilon < float("inf"):
      raise ValueError(f"epsilon = {self.epsilon}; expected a positive number")
    if self.stopping not in STOPPING:
      raise ValueError(f"stopping = {self.stopping!r}; expected one of {', '.join(STOPPING)}")
    if self.max_iterations is not None and not _is_count(self.max_iterations):
      raise ValueError(f"max_iterations = {self.max_iterations!r}; expected 1 or more")


@struct.dataclass
class OPIState:
  """Between two greedy steps.

  Attributes:
    base: `[S]` w, the value that the policy is greedy for.
    improved: `[S]` `T w`.
    policy: `[S]` int32.
    low: smallest entry of `T w - w`.
    high: largest entry.
    bottom: smallest entry of `T w`.
    top: largest entry.
    first: largest `|T w - w|` of the first iteration, from which the cap follows.
    previous: the span of the iteration before.
    iteration: greedy steps made.
  """

  base: jax.Array
  improved: jax.Array
  policy: jax.Array
  low: jax.Array
  high: jax.Array
  bottom: jax.Array
  top: jax.Array
  first: jax.Array
  previous: jax.Array
  iteration: jax.Array

  @property
  def span(self) -> jax.Array:
    return self.high - self.low


@struct.dataclass
class OPIResult:
  """A solution with what is known of its error.

  Attributes:
    value: `[S]` midpoint of the bounds, so its error is at most `(upper - lower) / 2`.
    policy: `[S]` int32, epsilon-optimal if `converged`.
    lower: `[S]` MacQueen-Porteus bounds of the optimal value, also if not converged; rounding in
      the value's type is allowed for, probabilities that miss a sum of 1 by more are not.
    upper: `[S]`.
    span: largest minus smallest entry of the last `T w - w`.
    num_iterations: greedy steps.
    converged: whether the stopping rule was met.
  """

  value: jax.Array
  policy: jax.Array
  lower: jax.Array
  upper: jax.Array
  span: jax.Array
  num_iterations: jax.Array
  converged: jax.Array


@struct.dataclass
class Trace:
  """History of `solve_trace`, an entry a greedy step.

  Attributes:
    span: `[n]` of `T w - w`.
    bound: `[n]` the value's stated error.
    error: `[n]` the value's largest distance from `reference`; NaN without one.
  """

  span: jax.Array
  bound: jax.Array
  error: jax.Array


@dataclasses.dataclass(frozen=True)
class _Devices:
  """How rows on many devices become the whole; one device has them all.

  Attributes:
    gather: `[rows] -> [S]`.
    low: minimum over devices.
    high: maximum over devices.
  """

  gather: Callable[[jax.Array], jax.Array] = lambda x: x
  low: Callable[[jax.Array], jax.Array] = lambda x: x
  high: Callable[[jax.Array], jax.Array] = lambda x: x


_ONE_DEVICE = _Devices()


def init(mdp: MDP, config: OPIConfig | None = None, value: jax.Array | None = None) -> OPIState:
  """The first greedy step, from `value [S]` (zeros when None)."""
  return _init(mdp, config or OPIConfig(), _start(mdp, value), None, _ONE_DEVICE)


def step(mdp: MDP, state: OPIState, config: OPIConfig | None = None) -> OPIState:
  """One iteration: m sweeps under the policy, H - 1 backups, and a greedy step."""
  return _step(mdp, state, config or OPIConfig(), None, _ONE_DEVICE)


def solve(
  mdp: MDP, config: OPIConfig | None = None, initial_value: jax.Array | None = None
) -> OPIResult:
  """Solves a discounted Markov decision process by optimistic policy iteration.

  Puterman and Shin (1978), with lookahead (Efroni et al., arXiv 1809.01843) and lambda returns
  (Bertsekas). Works under jit and vmap, where inputs are not checked and nothing is said about a
  cap; a batch runs until its slowest model has converged. `optimal_value` is the part of the
  result that has gradients.

  Args:
    mdp: the model.
    config: see `OPIConfig`.
    initial_value: `[S]`, zeros when None. Any start converges.

  Returns:
    An `OPIResult`. When the cap is hit, or rounding hides further progress, `converged` is False
    and the bounds still hold.

  Raises:
    ValueError: a model that `check_mdp` refuses, an initial value of another shape or not finite,
      or an epsilon below what the value's type resolves.
  """
  config = config or OPIConfig()
  concrete = is_concrete((mdp, initial_value))
  if concrete:
    check_mdp(mdp)
  result, stalled = _solve(mdp, config, _start(mdp, initial_value))
  if concrete and is_concrete(result):
    _judge(result, stalled, config, mdp.dtype)
  return result


def solve_trace(
  mdp: MDP,
  config: OPIConfig,
  num_iterations: int,
  initial_value: jax.Array | None = None,
  reference: jax.Array | None = None,
) -> tuple[OPIResult, Trace]:
  """A fixed number of iterations with their history; no stopping rule.

  Args:
    mdp: the model.
    config: its `epsilon` and `stopping` only decide `converged`.
    num_iterations: greedy steps, 1 or more.
    initial_value: `[S]`, zeros when None.
    reference: `[S]` value that errors are measured from.

  Returns:
    `(result, trace)`.
  """
  if not _is_count(num_iterations):
    raise ValueError(f"num_iterations = {num_iterations}; expected an integer of 1 or more")
  if is_concrete((mdp, initial_value)):
    check_mdp(mdp)
  return _solve_trace(mdp, config, num_iterations, _start(mdp, initial_value), reference)


def solve_sharded(
  mdp: MDP,
  mesh: Mesh,
  config: OPIConfig | None = None,
  *,
  axis: str | tuple[str, ...] = "data",
  initial_value: jax.Array | None = None,
) -> OPIResult:
  """`solve` with the states spread over one or several mesh axes.

  Each device holds the rows of its states and the whole value; a sweep is local, followed by an
  all-gather of the value. If the states do not divide, states that stay at reward 0 are added and
  taken away again.

  Args:
    mdp: a tabular or sparse model.
    mesh: the devices.
    config: as in `solve`, except that exact evaluation (num_sweeps=None) is not sharded.
    axis: mesh axis or axes that states are spread over.
    initial_value: `[S]`, zeros when None.

  Returns:
    The same as `solve`, up to the order of sums in a dense row.

  Raises:
    ValueError: as `solve`; also a matrix-free model, exact evaluation, or an axis that the mesh
      does not have.
  """
  config = config or OPIConfig()
  axes = (axis,) if isinstance(axis, str) else tuple(axis)
  if isinstance(mdp, OperatorMDP):
    raise ValueError(
      "mdp is matrix-free; expected a TabularMDP or SparseMDP, whose rows can be split"
    )
  if config.num_sweeps is None:
    raise ValueError("num_sweeps = None is not sharded; give a number of sweeps, 100 say")
  missing = [name for name in axes if name not in mesh.axis_names]
  if missing:
    raise ValueError(f"axis = {axis!r}; expected axes of the mesh, which has {mesh.axis_names}")
  # A mesh with explicit axes would want every array resharded by hand.
  mesh = Mesh(mesh.devices, mesh.axis_names)
  concrete = is_concrete((mdp, initial_value))
  if concrete:
    check_mdp(mdp)
  if jax.process_count() > 1:
    # A local array belongs to one process; a NumPy array is taken to be the same in all.
    mdp, initial_value = jax.tree.map(
      lambda x: np.asarray(x) if getattr(x, "is_fully_addressable", False) else x,
      (mdp, initial_value),
    )
  result, stalled = _solve_sharded(mdp, config, _start(mdp, initial_value), mesh, axes)
  if concrete:
    _judge(result, stalled, config, mdp.dtype)
  return result


def optimal_value(mdp: MDP, config: OPIConfig | None = None) -> jax.Array:
  """The optimal value `[S]`, with reverse-mode gradients in the model's arrays and discount.

  Near a solution the greedy policy does not move, so the gradient is that of the policy's linear
  system: with `y = (I - g P_mu)^-T c`, it is the pullback of y through one policy backup. At ties
  it is the gradient of the policy that the solver chose, one of several one-sided ones.
  Parameters of an `OperatorMDP` take part when `jax.tree_util.Partial` holds them.

  Args:
    mdp: the model.
    config: as in `solve`.

  Raises:
    ValueError: outside jit and grad, a model that `check_mdp` refuses or an epsilon below what the
      type resolves; the cap warns there, as in `solve`. Inside, nothing tells: solve once outside.
  """
  config = config or OPIConfig()
  if not is_concrete(mdp):
    return _optimal_value(mdp, config)
  check_mdp(mdp)
  result, stalled = _solve(mdp, config, _start(mdp, None))
  if is_concrete(result):
    _judge(result, stalled, config, mdp.dtype)
  return result.value


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _optimal_value(mdp: MDP, config: OPIConfig) -> jax.Array:
  return _solve(mdp, config, _start(mdp, None))[0].value


def _optimal_value_forward(mdp: MDP, config: OPIConfig):
  result, _ = _solve(mdp, config, _start(mdp, None))
  return result.value, (mdp, result.policy, result.value)


def _optimal_value_backward(config: OPIConfig, residuals: tuple, cotangent: jax.Array):
  mdp, policy, value = residuals
  _, expect = policy_rows(mdp, policy)
  transpose = jax.linear_transpose(expect, value)
  weight = solve_linear(lambda y: transpose(y)[0], cotangent, mdp.discount).value
  _, pullback = jax.vjp(lambda model: policy_backup(model, policy, value), mdp)
  return pullback(weight)


_optimal_value.defvjp(_optimal_value_forward, _optimal_value_backward)


def _is_count(value: object) -> bool:
  return isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1


def _start(mdp: MDP, value: jax.Array | None) -> jax.Array:
  if value is None:
    return jnp.zeros(mdp.num_states, mdp.dtype)
  value = jnp.asarray(value, mdp.dtype)
  if value.shape != (mdp.num_states,):
    raise ValueError(
      f"the initial value has shape {value.shape}; expected a number for each of "
      f"{mdp.num_states} states"
    )
  if is_concrete(value) and not jnp.isfinite(value).all():
    raise ValueError(
      f"the initial value of state {int(jnp.argmin(jnp.isfinite(value)))} is not finite"
    )
  return value


def _init(
  mdp: MDP, config: OPIConfig, value: jax.Array, valid: jax.Array | None, devices: _Devices
) -> OPIState:
  state = _improve(mdp, value, config, valid, devices)
  first = jnp.maximum(abs(state.low), abs(state.high))
  return state.replace(first=first)


def _step(
  mdp: MDP, state: OPIState, config: OPIConfig, valid: jax.Array | None, devices: _Devices
) -> OPIState:
  value = _partial_evaluation(mdp, state, config, devices)
  new = _improve(mdp, value, config, valid, devices)
  return new.replace(first=state.first, previous=state.span, iteration=state.iteration + 1)


def _improve(
  mdp: MDP, base: jax.Array, config: OPIConfig, valid: jax.Array | None, devices: _Devices
) -> OPIState:
  for _ in range(config.lookahead - 1):
    base = greedy(bellman_q(mdp, devices.gather(base)))[1]
  policy, improved = greedy(bellman_q(mdp, devices.gather(base)))
  change = improved - base
  # Rows that fill up a device must not enter the bounds.
  inner = jnp.inf if valid is None else jnp.where(valid, jnp.inf, -jnp.inf)
  return OPIState(
    base=base,
    improved=improved,
    policy=policy,
    low=devices.low(jnp.min(jnp.maximum(change, -inner))),
    high=devices.high(jnp.max(jnp.minimum(change, inner))),
    bottom=devices.low(jnp.min(jnp.maximum(improved, -inner))),
    top=devices.high(jnp.max(jnp.minimum(improved, inner))),
    first=jnp.zeros((), improved.dtype),
    previous=jnp.full((), jnp.inf, improved.dtype),
    iteration=jnp.int32(1),
  )


def _partial_evaluation(
  mdp: MDP, state: OPIState, config: OPIConfig, devices: _Devices
) -> jax.Array:
  """`T_mu^(m-1) T w`, or the lambda-weighted mean of such powers."""
  reward, expect = policy_rows(mdp, state.policy)
  lam = 1.0 if config.lam is None else config.lam
  # v = (1 - lam) T w + lam T_mu v has the lambda return as its fixed point; j sweeps from T w cut
  # its sum after j + 1 terms. At lam = 1 they are plain sweeps.
  constant = (1 - lam) * state.improved + lam * reward
  if config.num_sweeps is None:
    return solve_linear(
      lambda v: lam * expect(v), constant, lam * mdp.discount, start=state.improved
    ).value
  if isinstance(config.num_sweeps, tuple):
    schedule = jnp.asarray(config.num_sweeps, jnp.int32)
    sweeps = schedule[jnp.minimum(state.iteration, len(schedule)) - 1]
  else:
    sweeps = config.num_sweeps
  return jax.lax.fori_loop(
    0, sweeps - 1, lambda _, v: constant + lam * expect(devices.gather(v)), state.improved
  )


def _threshold(mdp: MDP, config: OPIConfig, state: OPIState) -> jax.Array:
  """What the span or twice the norm of `T w - w` must stay below."""
  dtype = state.improved.dtype
  discount = jnp.maximum(jnp.asarray(mdp.discount, dtype), jnp.finfo(dtype).tiny)
  scale = (1 - mdp.discount) / discount
  if config.epsilon is None:
    return jnp.maximum(1e-6 * scale, _floor(state))
  return jnp.maximum(config.epsilon * scale, jnp.finfo(dtype).tiny)


def _measure(mdp: MDP, config: OPIConfig, state: OPIState) -> jax.Array:
  if config.stopping == "span":
    measure = state.span
  else:
    measure = 2 * jnp.maximum(abs(state.low), abs(state.high))
  # An iterate much larger than the solution, after a start far too large, rounds away what tells
  # actions apart: go on until it has come down.
  hidden = _size(state) > 2 * _size(state, _shift(mdp, state))
  return measure + jnp.where(hidden, 2 * _floor(state), 0)


def _shift(mdp: MDP, state: OPIState) -> jax.Array:
  """From `T w` to the midpoint of the bounds."""
  return mdp.discount / (1 - mdp.discount) * (state.low + state.high) / 2


def _size(state: OPIState, shift: jax.Array | float = 0.0) -> jax.Array:
  return jnp.maximum(abs(state.bottom + shift), abs(state.top + shift))


def _floor(state: OPIState) -> jax.Array:
  # T w - w is a difference of numbers of this size, each rounded.
  return 8 * jnp.finfo(state.improved.dtype).eps * _size(state)


def _stalled(mdp: MDP, config: OPIConfig, state: OPIState) -> jax.Array:
  """Whether rounding alone is left, and more of it than `epsilon` lets pass."""
  # Nothing gets better then: stop instead of running to the cap. A change that rounds to zero is
  # no proof of an epsilon below what the type resolves.
  measure, threshold = _measure(mdp, config, state), _threshold(mdp, config, state)
  unresolved = threshold < _floor(state)
  return unresolved & (
    (measure <= threshold) | ((measure <= _floor(state)) & (state.span >= state.previous))
  )


def _loop(
  mdp: MDP, config: OPIConfig, value: jax.Array, valid: jax.Array | None, devices: _Devices
) -> tuple[OPIResult, jax.Array]:
  def running(state: OPIState) -> jax.Array:
    threshold = _threshold(mdp, config, state)
    return (
      (_measure(mdp, config, state) > threshold)
      & ~_stalled(mdp, config, state)
      & (state.iteration < _cap(mdp, config, state, threshold))
    )

  state = jax.lax.while_loop(
    running,
    lambda state: _step(mdp, state, config, valid, devices),
    _init(mdp, config, value, valid, devices),
  )
  return _result(mdp, config, state), _stalled(mdp, config, state)


def _cap(mdp: MDP, config: OPIConfig, state: OPIState, threshold: jax.Array) -> jax.Array | int:
  if config.max_iterations is not None:
    return config.max_iterations
  # Lowering the start by first/(1-g) makes the iterates rise to the optimum and moves all of them
  # by a constant, so |v_k - v*| <= 3 first/(1-g) g^(kH), and the measure is at most 4 times that.
  distance = 12 * state.first / (1 - mdp.discount)
  rate = config.lookahead * jnp.log(jnp.maximum(mdp.discount, 1e-6))
  fall = jnp.log(threshold) - jnp.log(jnp.maximum(distance, threshold))
  return 2 + jnp.ceil(fall / rate).astype(int)


def _result(mdp: MDP, config: OPIConfig, state: OPIState) -> OPIResult:
  gain = mdp.discount / (1 - mdp.discount)
  # Rounded rows of probabilities act on the whole solution, not on the iterate only.
  size = jnp.maximum(_size(state), _size(state, _shift(mdp, state)))
  rounding = 8 * jnp.finfo(state.improved.dtype).eps * size / (1 - mdp.discount)
  lower, upper = gain * state.low, gain * state.high
  threshold = _threshold(mdp, config, state)
  return OPIResult(
    value=state.improved + (lower + upper) / 2,
    policy=state.policy,
    lower=state.improved + (lower - rounding),
    upper=state.improved + (upper + rounding),
    span=state.span,
    num_iterations=state.iteration,
    converged=(_measure(mdp, config, state) <= threshold) & (threshold >= _floor(state)),
  )


@functools.partial(jax.jit, static_argnames=("config",))
def _solve(mdp: MDP, config: OPIConfig, value: jax.Array) -> tuple[OPIResult, jax.Array]:
  return _loop(mdp, config, value, None, _ONE_DEVICE)


@functools.partial(jax.jit, static_argnames=("config", "num_iterations"))
def _solve_trace(
  mdp: MDP,
  config: OPIConfig,
  num_iterations: int,
  value: jax.Array,
  reference: jax.Array | None,
) -> tuple[OPIResult, Trace]:
  def record(state: OPIState) -> Trace:
    result = _result(mdp, config, state)
    error = jnp.nan if reference is None else jnp.max(abs(result.value - reference))
    return Trace(state.span, jnp.max(result.upper - result.lower) / 2, error)

  def body(state: OPIState, _: None) -> tuple[OPIState, Trace]:
    state = _step(mdp, state, config, None, _ONE_DEVICE)
    return state, record(state)

  first = _init(mdp, config, value, None, _ONE_DEVICE)
  last, rest = jax.lax.scan(body, first, None, length=num_iterations - 1)
  trace = jax.tree.map(lambda a, b: jnp.concatenate([jnp.atleast_1d(a), b]), record(first), rest)
  return _result(mdp, config, last), trace


@functools.partial(jax.jit, static_argnames=("config", "mesh", "axes"))
def _solve_sharded(
  mdp: MDP, config: OPIConfig, value: jax.Array, mesh: Mesh, axes: tuple[str, ...]
) -> tuple[OPIResult, jax.Array]:
  count = int(np.prod([mesh.shape[name] for name in axes]))
  size = mdp.num_states
  padding = -size % count
  mdp, value = _pad(mdp, padding), jnp.pad(value, (0, padding))
  devices = _Devices(
    gather=lambda x: jax.lax.all_gather(x, axes, tiled=True),
    low=lambda x: jax.lax.pmin(x, axes),
    high=lambda x: jax.lax.pmax(x, axes),
  )
  rows, whole = PartitionSpec(axes), PartitionSpec()
  model_spec = jax.tree.map(lambda x: rows if jnp.ndim(x) else whole, mdp)
  result_spec = OPIResult(rows, rows, rows, rows, whole, whole, whole)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(model_spec, rows, rows),
    out_specs=(result_spec, whole),
    # Loops carry values that are equal on all devices, which the checker cannot follow.
    check_vma=False,
  )
  def run(mdp: MDP, value: jax.Array, valid: jax.Array) -> tuple[OPIResult, jax.Array]:
    return _loop(mdp, config, value, valid, devices)

  result, stalled = run(mdp, value, jnp.arange(size + padding) < size)
  trimmed = {name: getattr(result, name)[:size] for name in ("value", "policy", "lower", "upper")}
  return result.replace(**trimmed), stalled


def _pad(mdp: MDP, padding: int) -> MDP:
  """Adds states that stay where they are, at reward 0."""
  if not padding:
    return mdp

  def pad(x: jax.Array, **kwargs) -> jax.Array:
    return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), **kwargs)

  changes = {"reward": pad(mdp.reward)}
  if mdp.mask is not None:
    changes["mask"] = pad(mdp.mask, constant_values=True)
  if isinstance(mdp, SparseMDP):
    # A successor of probability 0 adds nothing: value 0 stays value 0.
    changes |= {"next_state": pad(mdp.next_state), "probability": pad(mdp.probability)}
  else:
    wide = jnp.pad(mdp.transition, [(0, 0), (0, 0), (0, padding)])
    changes["transition"] = pad(wide)
  return mdp.replace(**changes)


def _judge(result: OPIResult, stalled: jax.Array, config: OPIConfig, dtype: object) -> None:
  if result.converged:
    return
  half = float(jnp.max(result.upper - result.lower)) / 2
  if stalled:
    # threshold = epsilon (1 - g) / g, and the bounds allow for a measure of the floor.
    advice = "" if dtype == jnp.float64 else "enable float64 (jax_enable_x64) or "
    raise ValueError(
      f"epsilon = {config.epsilon} is below what {jnp.dtype(dtype).name} resolves at values of "
      f"this size; {advice}raise epsilon to {2 * half:.2g}"
    )
  warnings.warn(
    f"optimistic policy iteration stopped after {int(result.num_iterations)} iterations with "
    f"values known to +-{half:.3g}; raise max_iterations (now "
    f"{config.max_iterations}) or epsilon (now {config.epsilon})",
    stacklevel=3,
  )
