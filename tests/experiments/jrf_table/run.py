"""Trains one table and records every number of it."""

from experiments.jrf import judge
from experiments.jrf.arms import Arm
from experiments.jrf.run import load
from experiments.jrf.training import Training, train_table

RATES = (0.3, 0.3)


def run(config, run):
  data = load(config)
  methods = ("naive", "reweight", "jrf", "jrf_paper", "oracle")
  arms = [Arm(method, RATES, RATES, 0.3) for method in methods]
  training = Training.from_config(config)
  table = run.unit("table", lambda: train_table(run, data, arms, 3, training))
  judge.record_metrics(run, "table", arms, table["test"])
  judge.record_metrics(run, "validation", arms, table["validation"])
