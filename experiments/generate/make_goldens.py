"""Makes goldens.json: what transformers computes with SmolLM2-135M from the same GGUF file.

  pip install torch transformers gguf accelerate
  python experiments/generate/make_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf

transformers reads and unpacks the file by itself, in float32. Not part of a run: goldens.json is
committed.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import sys

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import strings  # noqa: E402

NEW_TOKENS = 64
SAMPLED_LOGITS = 64

PROMPTS = (
  "The capital of France is",
  "Once upon a time, in a small village by the sea,",
  "def fibonacci(n):\n",
  "The three laws of thermodynamics state that",
  "Q: What is 17 + 25?\nA:",
  "Dear Sir or Madam,\n\nI am writing to",
  "La capitale de l'Allemagne est",
  "Die Hauptstadt von Italien ist",
  "import numpy as np\n\nx = np.",
  "In 1969, Neil Armstrong",
  "The mitochondria is",
  "Ingredients:\n- 2 eggs\n- 200 g of flour\n",
  "SELECT name, age FROM users WHERE",
  "To be, or not to be,",
  "<h1>Welcome</h1>\n<p>",
  "日本の首都は",
  "A list of prime numbers: 2, 3, 5, 7,",
  "😀 is an emoji that",
  "The quick brown fox",
  "Photosynthesis is the process by which plants convert sunlight into energy. In the first step,",
)


def main() -> None:
  path = pathlib.Path(sys.argv[1])
  source = {"gguf_file": path.name}
  tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
  # The file names the rule of SmolLM, every digit a word; transformers does not read the name.
  digits = pre_tokenizers.Digits(individual_digits=True)
  rest = tokenizer.backend_tokenizer.pre_tokenizer
  tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
  model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source).eval()
  chosen = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(0))
  chosen = chosen[:SAMPLED_LOGITS]
  rows = []
  for prompt in PROMPTS:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
      logits = model(ids).logits[0, -1]
      done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
      )
      steps = model(done).logits[0, ids.shape[1] - 1 : -1]
    best = steps.topk(2, dim=-1).values
    rows.append(
      {
        "prompt": prompt,
        "prompt_ids": ids[0].tolist(),
        "continuation": done[0, ids.shape[1] :].tolist(),
        # Of the best logit to the second at each step: where it is tiny, rounding decides.
        "gap": [round(x, 6) for x in (best[:, 0] - best[:, 1]).tolist()],
        "logits": [float(f"{x:.8g}") for x in logits[chosen].tolist()],
        "largest_logit": float(logits.abs().max()),
      }
    )
  texts = strings.strings()
  token_ids = tokenizer(texts, add_special_tokens=False).input_ids
  hashes = [hashlib.sha256(str(row).encode()).hexdigest()[:8] for row in token_ids]
  made = {
    "made_by": {
      name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")
    },
    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    "logit_ids": chosen.tolist(),
    "rows": rows,
    "token_id_hashes": hashes,
  }
  (HERE / "goldens.json").write_text(json.dumps(made, ensure_ascii=False) + "\n")


if __name__ == "__main__":
  main()
