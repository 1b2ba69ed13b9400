r"""JRF: a fair classifier from noisy labels and noisy group membership, on Adult and COMPAS.

python launch.py --config=jrf                 # Adult, about 6 min on 2 cores
python launch.py --config=jrf:smoke           # half a minute, a tenth of Adult
python launch.py --config=jrf:compas          # COMPAS (fetched once, 28 MB)
python launch.py --config=jrf:credit          # default of credit card clients (fetched once)
python launch.py --config=jrf:law             # law school admissions (fetched once)
python launch.py --config=jrf:bank --config.dataset.path=bank-full.csv
python launch.py --config=jrf:paper           # the authors' protocol on the chosen dataset

Expected on Adult at flip rates 0.3 (default preset): soft gap 0.024 for JRF, 0.051 for the naive
penalty, 0.007 for the clean-attribute oracle; AUC 0.84, 0.86, 0.83. The authors' own
hyper-parameters give a classifier that predicts one class.
"""

import ml_collections

PRESETS = ("default", "smoke", "compas", "credit", "law", "bank", "paper")

_DATASETS = {"compas": "compas", "credit": "credit_default", "law": "law_school", "bank": "bank"}


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
  """The config of a preset, one of PRESETS."""
  section = ml_collections.ConfigDict
  config = section()
  config.experiment = "jrf"
  config.preset = preset
  config.seed = 0

  config.dataset = section()
  config.dataset.name = _DATASETS.get(preset, "adult")
  config.dataset.features = "all"  # or "numeric", as the authors
  config.dataset.path = ""  # of the user's own file; only "bank" needs one
  config.dataset.fraction = 1.0  # share of the rows that is used
  config.dataset.test_fraction = 0.3
  config.dataset.validation_fraction = 0.2  # of the other rows; noisy, for early stopping
  config.dataset.standardise_on = "train"  # or "all": the authors' choice, which leaks

  config.model = section()
  config.model.hidden = (32, 32)
  config.model.initial = "lecun"  # or "uniform", PyTorch's

  config.train = section()
  config.train.steps = 120
  config.train.learning_rate = 5e-3
  config.train.weight_decay = 1e-4
  config.train.early_stopping = True
  config.train.eval_every = 10
  config.train.ema_decay = 0.0  # full batches need no running averages
  config.train.vmap_models = 1  # models at once on a device; more is faster on accelerators

  # (P(noisy = 1 | clean = 0), P(noisy = 0 | clean = 1)); flips are put on training rows only.
  config.noise = section()
  config.noise.label = (0.3, 0.3)
  config.noise.attribute = (0.3, 0.3)
  config.noise.attribute_asymmetric = (0.1, 0.4)

  config.fairness = section()
  config.fairness.penalty = "abs"  # or "squared", "smooth"
  config.fairness.weight = 0.0  # lambda of all methods; 0 to choose it by the next two keys
  # The weight chosen is the smallest of these at which the oracle's soft gap is at most the target.
  config.fairness.weights = (0.1, 0.2, 0.4, 0.8)
  config.fairness.oracle_soft_gap = 0.01

  config.seeds = 10
  config.sweeps = section()
  config.sweeps.seeds = 4
  config.sweeps.noise_rates = (0.0, 0.1, 0.2, 0.3, 0.4)
  config.sweeps.assumed_rates = (0.0, 0.1, 0.2, 0.3, 0.35, 0.4)

  # The authors' own hyper-parameters, run beside ours: what their tables rest on.
  config.authors = section()
  config.authors.seeds = 5
  config.authors.steps = 50
  config.authors.hidden = (32, 32)
  config.authors.fairness_weight = 15.0
  config.authors.noise_rates = (0.3,)

  config.fairlearn = section()
  config.fairlearn.seeds = 5
  config.fairlearn.iterations = 5

  # Models are spread over the axis "model", rows over "data". Splitting the CPU into a device a
  # core trains that many models at a time, and does not change their numbers.
  config.mesh = section({"data": 1, "model": -1})
  config.cpu_devices = -1

  if preset == "compas":
    config.authors.hidden = (32, 16)
    config.authors.steps = 60
    config.train.steps = 300  # 5,278 rows: cheap
    config.sweeps.seeds = 10
  if preset == "smoke":
    config.dataset.fraction = 0.1
    config.train.steps = 40
    config.seeds = 2
    config.sweeps.seeds = 2
    config.sweeps.noise_rates = (0.0, 0.3)
    config.sweeps.assumed_rates = (0.0, 0.3)
    config.fairness.weights = (0.3, 1.0)
    config.authors.seeds = 2
    config.fairlearn.seeds = 1
    config.fairlearn.iterations = 3
  if preset == "paper":
    config.dataset.features = "numeric"
    config.dataset.standardise_on = "all"
    config.dataset.validation_fraction = 0.0
    config.model.initial = "uniform"
    config.train.early_stopping = False
    config.train.weight_decay = 0.0
    config.train.steps = 50
    config.train.vmap_models = 16
    config.fairness.weight = 15.0
    config.fairness.weights = (5.0, 10.0, 15.0, 20.0, 25.0)
    config.seeds = 5
    config.sweeps.seeds = 5
    config.sweeps.assumed_rates = (0.0, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.42)
    config.authors.noise_rates = (0.0, 0.2, 0.3, 0.4)
  return config
