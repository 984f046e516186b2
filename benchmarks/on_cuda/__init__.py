"""What `benchmarks/gpu.py` measures, one kind of measurement a file."""
