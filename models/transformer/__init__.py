"""A decoder of the Llama family, its weights, tokenizer, cache, adapters and sampling.

- `config`: `TransformerConfig`; Llama, SmolLM2, Qwen2.5 and Qwen3 differ in its fields only.
- `model`: `Transformer`, a Flax module: tokens or embeddings in, logits, cache and hidden out.
- `cache`: `KVCache`, an immutable value. `lora`: adapters as a pytree beside the parameters.
- `weights`: GGUF files and safetensors folders. `tokenizer`, `chat`: text and ids.
- `generate`: batched sampling with log-probabilities.
- `sharding`: what lies on which mesh axis.
"""

from models.transformer.cache import KVCache, init_cache, repeat
from models.transformer.config import (
  FAMILIES,
  RopeScaling,
  TransformerConfig,
  from_huggingface,
  to_huggingface,
)
from models.transformer.generate import (
  Generation,
  SamplingConfig,
  generate,
  sample,
  truncated_logits,
)
from models.transformer.lora import LoRAConfig, init_lora, merge_lora
from models.transformer.model import Output, Transformer
from models.transformer.sharding import cache_shardings, param_shardings

__all__ = [
  "FAMILIES",
  "Generation",
  "KVCache",
  "LoRAConfig",
  "Output",
  "RopeScaling",
  "SamplingConfig",
  "Transformer",
  "TransformerConfig",
  "cache_shardings",
  "from_huggingface",
  "generate",
  "init_cache",
  "init_lora",
  "merge_lora",
  "param_shardings",
  "repeat",
  "sample",
  "to_huggingface",
  "truncated_logits",
]
