"""What XLA lacks: Pallas attention kernels and native XLA FFI operations. Imports jax only."""
