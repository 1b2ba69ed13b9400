"""Weights on disk: GGUF files and Hugging Face safetensors folders. Nothing is unpickled."""

from models.transformer.weights.gguf import read_gguf
from models.transformer.weights.names import from_tensors, to_tensors
from models.transformer.weights.safetensors import read_folder, save_folder

__all__ = ["from_tensors", "read_folder", "read_gguf", "save_folder", "to_tensors"]
