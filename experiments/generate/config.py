r"""generate: text from a language model, streamed: SmolLM2, any GGUF file, any safetensors folder.

python launch.py --config=generate --config.prompt="Why is the sky blue?"
python launch.py --config=generate --config.model=file.gguf --config.prompt="..."
python launch.py --config=generate --config.model=folder --config.chat=False --config.prompt="..."
python launch.py --config=generate:smoke     # a random model of a few thousand parameters, seconds

The default model is SmolLM2-135M-Instruct (93 MB, fetched once). About 25 tokens/s on 2 cores. A
run ends with a comparison with transformers of half a minute; --config.check=False leaves it out.
"""

import ml_collections

PRESETS = ("default", "smoke", "paper")


def get_config(preset: str = "default") -> ml_collections.ConfigDict:
  """The config of a preset, one of PRESETS."""
  config = ml_collections.ConfigDict()
  config.experiment = "generate"
  config.preset = preset
  config.seed = 0

  config.model = "smollm2-135m"  # or the path of a GGUF file or of a folder; "random" in smoke
  config.prompt = "What is the capital of France, and what is it known for?"
  config.system = ""  # system message; "" leaves it to the model's template
  config.chat = True  # put the prompt into the model's chat template
  config.copies = 1  # answers to the prompt, side by side
  config.temperature = 0.0  # 0 is greedy
  config.top_k = 0  # 0 for all
  config.top_p = 1.0
  config.max_new_tokens = 256
  config.dtype = "float32"
  # After the answer, compare logits, greedy text and token ids with what transformers gave for the
  # same file; of the default model in float32 only.
  config.check = preset == "default"

  if preset == "smoke":
    config.model = "random"
    config.chat = False
    config.max_new_tokens = 24
  if preset == "paper":
    # Sizes for an accelerator; a folder of Qwen3-8B, say.
    config.dtype = "bfloat16"
    config.copies = 32
    config.temperature = 0.7
    config.max_new_tokens = 4096
  return config
