r"""OPI: optimistic policy iteration, between value and policy iteration, planned and sampled.

python launch.py --config=opi                          # all models and claims, 5 min on 2 cores
python launch.py --config=opi:smoke                    # a minute, every code path
python launch.py --config=opi:mdp --config.file=my.npz # your own model from a file
python launch.py --config=opi:mdp --config.factory=my_model.py:build       # or from a function
python launch.py --config=opi:paper --config.mesh.data=-1   # 10 million states over the mesh

Expected (default preset): the investment model takes 1,463 iterations with one sweep each and 16
with 100; the counterexample is stuck near q(0,0) = 1.7 at rho 10, and the repair frees all seeds.

A file has reward [S, A], discount, and either next_state and probability [S, A, K] or transition
[S, A, S]; optionally mask [S, A]. The solution is left in WORKDIR/solution.npz.
"""

import ml_collections

PRESETS = ("default", "smoke", "mdp", "paper")


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
  """The config of a preset, one of PRESETS."""
  section = ml_collections.ConfigDict
  config = section()
  config.experiment = "opi"
  config.preset = preset
  config.seed = 0
  config.x64 = True
  config.mesh = section({"data": -1, "model": 1})

  config.study = {"mdp": "mdp", "paper": "large"}.get(preset, "claims")
  config.file = ""  # of study "mdp"
  config.factory = ""  # "file.py:function" or "module:function" that returns a model

  config.solver = section()  # of the studies "mdp" and "large"
  config.solver.num_sweeps = 50
  config.solver.lookahead = 1
  config.solver.epsilon = 1e-6
  config.solver.max_iterations = 0  # 0 for the bound that must suffice

  config.tables = ("frozenlake", "taxi", "cliff", "inventory", "car_rental")
  config.sweeps = (1, 5, 20, 100)
  config.random_models = 50  # of up to 200 states, solved in all ways
  config.investment = section({"num_outputs": 100, "num_shocks": 150})
  config.investment.sweeps = (1, 10, 50, 100, 400)
  config.sparse = section(
    {"num_states": 20_000, "num_actions": 8, "num_successors": 10, "discount": 0.99}
  )

  config.counterexample = section()
  config.counterexample.ratios = (1.5, 2.0, 3.0, 5.0, 10.0, 20.0)  # of the mean field
  config.counterexample.simulated = (1.3, 5.0, 10.0)
  config.counterexample.seeds = 10
  config.counterexample.updates = 60_000
  config.counterexample.step_size = 0.01
  config.counterexample.horizon = 80  # leaves 30 * .9^80 = .007 out of a return

  config.uniform = section()  # the claim of arXiv 2606.10580
  config.uniform.models = 100
  config.uniform.seeds = 20
  config.uniform.updates = 40_000

  if preset == "smoke":
    config.tables = ("frozenlake", "inventory")
    config.sweeps = (1, 20)
    config.random_models = 3
    config.investment.num_outputs, config.investment.num_shocks = 20, 15
    config.investment.sweeps = (1, 20)
    config.sparse.num_states = 500
    config.counterexample.ratios, config.counterexample.simulated = (2.0, 10.0), (1.3, 10.0)
    config.counterexample.seeds, config.counterexample.updates = 2, 6_000
    config.counterexample.step_size = 0.05
    config.uniform.models, config.uniform.seeds, config.uniform.updates = 6, 3, 2_000
  if preset == "paper":
    config.x64 = False
    config.sparse.num_states = 10_000_000
    config.solver.epsilon = 1e-2
  return config
