"""Makes tests/models/goldens: tiny random checkpoints and what transformers computes with them.

  pip install torch transformers && python tests/models/make_goldens.py

Not part of the test run: the files are committed.
"""

import pathlib
import shutil

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

HERE = pathlib.Path(__file__).parent / "goldens"
COMMON = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}
CONFIGS = {
  "llama3": LlamaConfig(**COMMON, rope_parameters=LLAMA3, rms_norm_eps=1e-5),
  "smollm": LlamaConfig(**COMMON, tie_word_embeddings=True, rms_norm_eps=1e-5),
  "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True, rms_norm_eps=1e-6),
  "qwen3": Qwen3Config(**COMMON, head_dim=16, rms_norm_eps=1e-6),
}


def main() -> None:
  for name, config in CONFIGS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
      for parameter in model.parameters():
        # Norms and biases start at 1 and 0: a mistake with them would not show.
        parameter += 0.1 * torch.randn_like(parameter)
    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
      logits = model(tokens).logits.numpy()
      greedy = model.generate(
        tokens[:, :10],
        # Without a mask, tokens equal to the padding's id would be hidden.
        attention_mask=torch.ones_like(tokens[:, :10]),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
      )
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
      folder / "expected.npz", tokens=tokens.numpy(), logits=logits, greedy=greedy.numpy()
    )


if __name__ == "__main__":
  main()
