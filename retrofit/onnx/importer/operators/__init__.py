"""ONNX operators as torch functions, one small function each, grouped by subject; `table` has them by domain and name."""
