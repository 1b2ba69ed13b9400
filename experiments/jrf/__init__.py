"""JRF on real data: see README.md."""
