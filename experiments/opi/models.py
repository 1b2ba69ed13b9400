"""The models of the study: Gymnasium tables, worked examples of the literature, simulated ones."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from algorithms import opi

GRID_SHAPES = {"frozenlake": (8, 8), "cliff": (4, 12)}
_GYM = {"frozenlake": "FrozenLake", "taxi": "Taxi", "cliff": "CliffWalking"}


def table(name: str) -> opi.SparseMDP | opi.TabularMDP:
  """A model by its name in `config.tables`.

  Raises:
    ValueError: there is no such model.
  """
  if name in _GYM:
    return gymnasium_table(name)
  if name == "inventory":
    return inventory()
  if name == "car_rental":
    return car_rental()
  known = ", ".join((*_GYM, "inventory", "car_rental"))
  raise ValueError(f"table {name!r}; expected some of {known}")


def gymnasium_table(name: str, discount: float = 0.99) -> opi.SparseMDP:
  """The exact transition table of a Gymnasium environment, with a state added for the end.

  Gymnasium's tables say of a transition that it ends the episode; it leads to the added last
  state here, which stays and pays nothing.
  """
  import gymnasium

  kwargs = {"map_name": "8x8"} if name == "frozenlake" else {}
  # Version numbers move between releases, the tables do not.
  versions = [spec.version for spec in gymnasium.registry.values() if spec.name == _GYM[name]]
  env = gymnasium.make(f"{_GYM[name]}-v{max(versions)}", **kwargs)
  entries = env.unwrapped.P
  num_states, num_actions = len(entries), len(entries[0])
  width = max(len(entries[s][a]) for s in entries for a in entries[s])
  reward = np.zeros((num_states + 1, num_actions))
  successor = np.full((num_states + 1, num_actions, width), num_states, np.int32)
  probability = np.zeros((num_states + 1, num_actions, width))
  probability[num_states, :, 0] = 1
  for s in range(num_states):
    for a in range(num_actions):
      for k, (chance, following, paid, ended) in enumerate(entries[s][a]):
        probability[s, a, k] = chance
        reward[s, a] += chance * paid
        successor[s, a, k] = num_states if ended else following
  return opi.SparseMDP(
    jnp.asarray(reward), jnp.asarray(successor), jnp.asarray(probability), discount
  )


def inventory(
  capacity: int = 40,
  success: float = 0.6,
  unit_cost: float = 0.2,
  fixed_cost: float = 0.8,
  discount: float = 0.98,
) -> opi.TabularMDP:
  """Inventory with a fixed cost of ordering; the optimal policy is an (s, S) rule.

  Sargent and Stachurski, *Dynamic Programming*, section 5.2.1: demand D is geometric, P(D = d) =
  (1 - p)^d p; a firm with x in stock sells min(x, D) at price 1, orders a at a cost of c a, and k
  if a > 0; the next stock is max(x - D, 0) + a.
  """
  stock = np.arange(capacity + 1)
  demand = np.arange(capacity)
  chance = success * (1 - success) ** demand
  transition = np.zeros((capacity + 1, capacity + 1, capacity + 1))
  sales = np.zeros(capacity + 1)
  for x in stock:
    left = np.zeros(capacity + 1)
    np.add.at(left, x - demand[:x], chance[:x])
    left[0] += 1 - chance[:x].sum()  # demand of x or more
    sales[x] = (demand[:x] * chance[:x]).sum() + x * (1 - chance[:x].sum())
    for a in range(capacity + 1 - x):
      transition[x, a, a:] = left[: capacity + 1 - a]
  orders = np.arange(capacity + 1)
  reward = sales[:, None] - unit_cost * orders - fixed_cost * (orders > 0)
  mask = stock[:, None] + orders <= capacity
  return opi.TabularMDP(jnp.asarray(reward), jnp.asarray(transition), discount, jnp.asarray(mask))


def car_rental(most_cars: int = 20, most_moved: int = 5, discount: float = 0.9) -> opi.TabularMDP:
  """Jack's car rental: Sutton and Barto, *Reinforcement Learning*, example 4.2.

  States are cars at two places at the end of a day (first * 21 + second); action a moves a - 5
  cars from the first to the second overnight at $2 each; a rental earns $10. Requests are Poisson
  with means 3 and 4, returns with means 3 and 2; cars beyond 20 are lost.
  """

  def day(requests: float, returns: float) -> tuple[np.ndarray, np.ndarray]:
    """`(P[n, n'], earned [n])` of one place with n cars in the morning."""
    size = most_cars + 1
    wanted = stats.poisson(requests).pmf(np.arange(size))
    brought = stats.poisson(returns).pmf(np.arange(size))
    move, earned = np.zeros((size, size)), np.zeros(size)
    for n in range(size):
      rented = np.append(wanted[:n], 1 - wanted[:n].sum())  # 0..n, all that is wanted beyond n is n
      earned[n] = 10 * (np.arange(n + 1) * rented).sum()
      for used, chance in enumerate(rented):
        left = n - used
        arrivals = np.append(brought[: most_cars - left], 1 - brought[: most_cars - left].sum())
        move[n, left:] += chance * arrivals
    return move, earned

  first_move, first_earned = day(3, 3)
  second_move, second_earned = day(4, 2)
  size = most_cars + 1
  moved = np.arange(-most_moved, most_moved + 1)
  reward = np.zeros((size * size, moved.size))
  transition = np.zeros((size * size, moved.size, size * size))
  mask = np.zeros((size * size, moved.size), bool)
  for i in range(size):
    for j in range(size):
      state = i * size + j
      for a, count in enumerate(moved):
        if not -j <= count <= i:
          continue
        x, y = min(i - count, most_cars), min(j + count, most_cars)
        mask[state, a] = True
        reward[state, a] = first_earned[x] + second_earned[y] - 2 * abs(count)
        transition[state, a] = np.outer(first_move[x], second_move[y]).ravel()
  return opi.TabularMDP(jnp.asarray(reward), jnp.asarray(transition), discount, jnp.asarray(mask))


def tauchen(size: int, persistence: float, deviation: float) -> tuple[np.ndarray, np.ndarray]:
  """Tauchen's (1986) grid of 3 standard deviations for `z' = rho z + nu e`.

  Returns:
    `(grid [n], transition [n, n])`.
  """
  spread = 3 * deviation / np.sqrt(1 - persistence**2)
  grid = np.linspace(-spread, spread, size)
  half = (grid[1] - grid[0]) / 2
  upper = stats.norm.cdf((grid[None, :-1] + half - persistence * grid[:, None]) / deviation)
  edges = np.concatenate([np.zeros((size, 1)), upper, np.ones((size, 1))], axis=1)
  return grid, np.diff(edges, axis=1)


def investment(num_outputs: int = 100, num_shocks: int = 150) -> opi.OperatorMDP:
  """A monopolist who adjusts output y at a cost, under shocks z of demand (QuantEcon's lectures).

  The reward of choosing y' is `(a0 - a1 y + z - c) y - gamma (y' - y)^2`; states are (y, z), the
  shock moving last. The expectation of the next value is one product with the shocks' transition,
  for all outputs at once: a hundredth of the work of a table.
  """
  outputs = np.linspace(0, 20, num_outputs)
  shocks, transition = tauchen(num_shocks, 0.9, 1.0)
  y, z = outputs[:, None, None], shocks[None, :, None]
  reward = (10 - y + z - 1) * y - 25 * (outputs[None, None, :] - y) ** 2
  discount = 1 / 1.01
  parameters = (jnp.asarray(reward), jnp.asarray(transition), discount)
  return opi.OperatorMDP(
    jax.tree_util.Partial(_investment_backup, *parameters),
    jax.tree_util.Partial(_investment_policy_backup, *parameters),
    discount,
    num_outputs * num_shocks,
    num_outputs,
    parameters[0].dtype,
  )


def _investment_backup(
  reward: jax.Array, transition: jax.Array, discount: jax.Array, value: jax.Array
) -> jax.Array:
  num_outputs, num_shocks, _ = reward.shape
  expected = transition @ value.reshape(num_outputs, num_shocks).T  # [z, y']
  return (reward + discount * expected[None]).reshape(-1, num_outputs)


def _investment_policy_backup(
  reward: jax.Array,
  transition: jax.Array,
  discount: jax.Array,
  policy: jax.Array,
  value: jax.Array,
) -> jax.Array:
  num_outputs, num_shocks, _ = reward.shape
  expected = transition @ value.reshape(num_outputs, num_shocks).T
  chosen = policy.reshape(num_outputs, num_shocks)
  paid = jnp.take_along_axis(reward, chosen[..., None], axis=2)[..., 0]
  return (paid + discount * expected[jnp.arange(num_shocks)[None], chosen]).ravel()


def random_sparse(
  key: jax.Array, num_states: int, num_actions: int, num_successors: int, discount: float
) -> opi.SparseMDP:
  """Normal rewards, uniform successors, Dirichlet(1) probabilities; simulated."""
  reward_key, next_key, chance_key = jax.random.split(key, 3)
  shape = (num_states, num_actions, num_successors)
  weights = jax.random.exponential(chance_key, shape)
  return opi.SparseMDP(
    jax.random.normal(reward_key, shape[:2]),
    jax.random.randint(next_key, shape, 0, num_states, jnp.int32),
    weights / weights.sum(axis=-1, keepdims=True),
    discount,
  )


def random_dense(
  rng: np.random.Generator, num_states: int, num_actions: int, discount: float
) -> opi.TabularMDP:
  """Normal rewards, Dirichlet(1) rows; simulated."""
  return opi.TabularMDP(
    jnp.asarray(rng.normal(size=(num_states, num_actions))),
    jnp.asarray(rng.dirichlet(np.ones(num_states), (num_states, num_actions))),
    discount,
  )


# The counterexample: two states, two actions, nothing random.
COUNTEREXAMPLE_Q = np.array([[24.0, 30.0], [30.0, 28.0]])


def counterexample() -> opi.TabularMDP:
  """Two states where updating the other action of state 0 more often keeps learning from q*."""
  following = np.array([[1, 0], [0, 0]])
  return opi.TabularMDP(
    jnp.array([[-3.0, 3.0], [3.0, 1.0]]), jnp.asarray(np.eye(2)[following]), 0.9
  )


def sliding_point(ratio: float) -> float | None:
  """`q(0,0) = q(0,1) = x` where the mean field comes to rest away from q*; None if nowhere.

  With both actions of state 0 tied, the field switches between the two greedy policies; x is where
  its components across and along the tie cancel: the smaller root of
  `(x + c)(30 - x) = rho^2 (x - c)(24 - x)`, c = .3 / .19 (derived here).
  """
  c, square = 0.3 / 0.19, ratio**2
  # (square - 1) x^2 + (30 - c - square (24 + c)) x + 30 c + 24 c square = 0
  roots = np.roots([square - 1, 30 - c - square * (24 + c), 30 * c + 24 * c * square])
  real = roots[np.isreal(roots)].real
  return float(real.min()) if real.size else None


def update_rates(ratio: float) -> Any:
  """`policy -> D [2, 2]`: in state 0 the other action is updated `ratio` times as often."""

  def rates(policy: jax.Array) -> jax.Array:
    other = jnp.arange(2)[None] != policy[:, None]
    first = (jnp.arange(2) == 0)[:, None]
    share = jnp.where(other, ratio, 1.0) / (1 + ratio)
    return jnp.where(first, share, 0.5) / 2

  return rates


def biased_start(ratio: float) -> Any:
  """The exploring start with these rates: `(key, policy) -> (s, a)`."""

  def start(key: jax.Array, policy: jax.Array) -> tuple[jax.Array, jax.Array]:
    state_key, action_key = jax.random.split(key)
    state = jax.random.randint(state_key, (), 0, 2)
    chance = jnp.where(state == 0, ratio / (1 + ratio), 0.5)
    other = jax.random.uniform(action_key) < chance
    return state, jnp.where(other, 1 - policy[state], policy[state])

  return start


_ARRAYS = ("reward", "next_state", "probability", "transition", "discount", "mask")


def from_file(path: str) -> opi.SparseMDP | opi.TabularMDP:
  """Reads a model from an npz file.

  Raises:
    ValueError: no such file, not an npz file, pickled objects in it, or keys that do not make a
      model.
  """
  try:
    with np.load(path, allow_pickle=False) as archive:
      found = {name: archive[name] for name in archive.files}
  except (OSError, ValueError, EOFError, TypeError, AttributeError) as error:
    raise ValueError(f"{path} is not an npz file of plain arrays: {error}") from None
  unknown = sorted(set(found) - set(_ARRAYS))
  sparse = {"next_state", "probability"} <= found.keys()
  if unknown or not {"reward", "discount"} <= found.keys() or sparse == ("transition" in found):
    raise ValueError(
      f"{path} has the keys {', '.join(sorted(found)) or 'none'}; expected reward, discount and "
      "either next_state and probability or transition, and if need be mask"
    )
  if found["discount"].size != 1:
    raise ValueError(f"discount in {path} has shape {found['discount'].shape}; expected a number")
  discount = float(found["discount"].reshape(()))
  mask = jnp.asarray(found["mask"]) if "mask" in found else None
  reward = jnp.asarray(found["reward"], float)
  if sparse:
    successors = found["next_state"]
    if not np.issubdtype(successors.dtype, np.integer):
      raise ValueError(f"next_state in {path} is {successors.dtype}; expected integers")
    if successors.size and np.abs(successors).max() > np.iinfo(np.int32).max:
      raise ValueError(f"next_state in {path} holds {np.abs(successors).max()}; expected a state")
    return opi.SparseMDP(
      reward,
      jnp.asarray(successors, jnp.int32),
      jnp.asarray(found["probability"], float),
      discount,
      mask,
    )
  return opi.TabularMDP(reward, jnp.asarray(found["transition"], float), discount, mask)


def from_factory(name: str) -> Any:
  """Calls the user's function `file.py:function` or `module:function`.

  Raises:
    ValueError: there is no such file, module or function, or it returns something else.
  """
  place, _, function = name.rpartition(":")
  try:
    if place.endswith(".py"):
      spec = importlib.util.spec_from_file_location(pathlib.Path(place).stem, place)
      module = importlib.util.module_from_spec(spec)
      sys.modules[spec.name] = module
      spec.loader.exec_module(module)
    else:
      module = importlib.import_module(place)
    build = getattr(module, function)
  except (ImportError, FileNotFoundError, AttributeError, ValueError) as error:
    raise ValueError(
      f"factory = {name!r} ({error}); expected file.py:function or module:function"
    ) from None
  mdp = build()
  if not isinstance(mdp, opi.MDP):
    raise ValueError(f"{name} returns a {type(mdp).__name__}; expected a model of algorithms.opi")
  return mdp
