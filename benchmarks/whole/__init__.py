"""The parts of benchmarks/whole_model.py."""
