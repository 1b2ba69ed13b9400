r"""GATE: the effect of treating everybody, from merged ramp-up stages of an A/B test on a network.

python launch.py --config=gate                  # 10,033 Wikipedia articles (fetched once), 6 min
python launch.py --config=gate:smoke            # a minute, a small simulated graph
python launch.py --config=gate:lfr              # a simulated graph with communities, 4 min
python launch.py --config=gate:movielens        # who rated the same films (fetched once)
python launch.py --config=gate:social_insure    # a field experiment with spill-overs in 44 villages
python launch.py --config=gate --config.graph=edges.csv --config.log=log.csv   # your own ramp-up
python launch.py --config=gate:paper --config.graph=socfb-Stanford3.mtx        # the authors' study

Expected on the Wikipedia graph (default preset, two_hop outcome, units randomised): merging all
stages takes the bias of ols from -0.456 to -0.160, with clusters from -0.297 to -0.152; the bias
formula says the same to 0.001.

A log has the columns node, stage, share, z and y. Give your clusters as --config.clusters=file.csv
(columns node, cluster) when treatment was drawn by cluster: standard errors depend on it.
"""

import ml_collections

PRESETS = ("default", "smoke", "lfr", "movielens", "social_insure", "paper")


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
  """The config of a preset, one of PRESETS."""
  section = ml_collections.ConfigDict
  config = section()
  config.experiment = "gate"
  config.preset = preset
  config.seed = 0

  config.study = "social_insure" if preset == "social_insure" else "ramp_up"
  # "wiki", "movielens", "lfr", or the path of an edge list (.csv, .tsv, .txt) or .mtx file.
  config.graph = preset if preset in ("lfr", "movielens") else "wiki"
  config.directed = False  # of a graph file: whether an edge also influences backwards
  config.isolated = "drop"  # or "zero": keep nodes without neighbours, with exposure 0
  config.log = ""  # the user's roll-out log; "" simulates outcomes
  config.clusters = ""  # file of the randomisation units; "" for Louvain, or unit level for a log

  config.louvain = section({"resolution": 10.0, "seed": 10})  # the authors'
  config.lfr = section({"num_nodes": 1500, "average_degree": 24, "seed": 0})

  config.shares = (0.02, 0.05, 0.1, 0.25, 0.5)
  config.randomisation = "complete"  # or "bernoulli"
  config.outcome = section()
  config.outcome.names = ("linear", "two_hop", "square", "sqrt", "multiplicative", "dynamic")
  config.outcome.intercept = 1.0
  config.outcome.direct = 1.0
  config.outcome.spillover = 1.0
  config.outcome.second_hop = 0.5  # of "two_hop"
  config.outcome.noise = 0.1

  config.replications = 200
  config.coverage_replications = 500
  config.batch = 8  # replications at once on a device
  config.x64 = True  # of everything but the network

  config.gnn = section()
  config.gnn.kind = "cheb"  # or "mean"
  config.gnn.hidden = 16
  config.gnn.learning_rate = 4e-3
  config.gnn.epochs = 400
  config.gnn.normalise_degree = True  # False: the authors' raw degree
  config.gnn.rectify_output = False  # True: the authors' network, which cannot predict below 0
  config.gnn.outcomes = ("linear", "two_hop")
  config.gnn.merged = (1, 2, 5)  # numbers of last stages that are merged
  config.gnn.replications = 10
  config.gnn.batch = 2

  # Of a log: features of the regressions, and what the bias bound assumes about interference.
  config.features = ("treatment", "linear", "quadratic")
  config.trend = False  # a linear trend over stages as a nuisance column
  config.bound = section({"total_spillover": 1.0, "support": "any"})  # or "neighbours"

  # Replications are spread over the axis "data", one device a core.
  config.mesh = section({"data": -1, "model": 1})
  config.cpu_devices = -1

  if preset == "lfr":
    config.gnn.replications = 100
  if preset == "movielens":
    # Its graph is dense: the authors' resolution leaves most users alone in their cluster.
    config.louvain.resolution = 1.0
  if preset == "smoke":
    config.graph = "lfr"
    config.lfr.num_nodes = 300
    config.lfr.average_degree = 12
    config.replications = 16
    config.coverage_replications = 16
    config.gnn.replications = 2
    config.gnn.epochs = 20
  if preset == "paper":
    config.x64 = False  # for accelerators
    config.graph = "socfb-Stanford3.mtx"
    config.replications = 1000
    config.coverage_replications = 1000
    config.gnn.normalise_degree = False
    config.gnn.rectify_output = True
    config.gnn.outcomes = config.outcome.names
    config.gnn.merged = (1, 2, 3, 4, 5)
    config.gnn.replications = 1000
    config.gnn.batch = 25
  return config
