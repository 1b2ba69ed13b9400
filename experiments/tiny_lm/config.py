r"""tiny_lm: a decoder of a million parameters, trained from scratch on procedural tasks.

python launch.py --config=tiny_lm           # sums and spelling, about 7 minutes on 2 cores
python launch.py --config=tiny_lm:smoke     # seconds
python launch.py --config=tiny_lm --config.train.steps=5000   # longer, better

The trained model is left in WORKDIR/model, a folder that --config=generate and later methods read.
"""

import ml_collections

PRESETS = ("default", "smoke", "paper")


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
  """The config of a preset, one of PRESETS."""
  section = ml_collections.ConfigDict
  config = section()
  config.experiment = "tiny_lm"
  config.preset = preset
  config.seed = 0

  # Tasks of reasoning-gym and their settings; experiments/tiny_lm/tasks.py shortens questions.
  config.tasks = section()
  config.tasks.chain_sum = section(
    {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
  )
  config.tasks.spell_backward = section({"max_word_len": 8})
  # Rows made of each task, and so its share of every batch.
  config.examples = section({"chain_sum": 120_000, "spell_backward": 40_000})
  config.held_out = 200  # of each task
  config.question_weight = 0.1  # of a question's token in the loss, an answer's is 1
  config.length = 20  # tokens of an example

  config.model = section()
  config.model.num_layers = 6
  config.model.hidden_size = 128
  config.model.mlp_size = 352
  config.model.num_heads = 4
  config.model.num_kv_heads = 2
  config.model.head_dim = 32

  config.train = section()
  config.train.steps = 2400
  config.train.batch = 96
  config.train.learning_rate = 3e-3
  config.train.warmup_steps = 50
  config.train.every = 60  # steps between two saves and log lines

  if preset == "smoke":
    config.examples.chain_sum = config.examples.spell_backward = 400
    config.held_out = 8
    config.model.num_layers, config.model.hidden_size, config.model.mlp_size = 2, 64, 128
    config.train.steps, config.train.batch, config.train.every = 6, 16, 3
    config.train.warmup_steps = 2
  if preset == "paper":
    # No paper: a size for an accelerator, to start methods from that want a better model.
    config.examples.chain_sum = config.examples.spell_backward = 1_000_000
    config.model.num_layers, config.model.hidden_size, config.model.mlp_size = 12, 768, 2048
    config.model.num_heads, config.model.num_kv_heads, config.model.head_dim = 12, 4, 64
    config.model.scan_layers = True  # compiles one layer instead of twelve
    config.train.steps, config.train.batch, config.train.learning_rate = 20_000, 1024, 6e-4
    config.train.warmup_steps = 1000
  return config
