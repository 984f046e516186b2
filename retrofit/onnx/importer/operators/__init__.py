"""ONNX operators as torch functions, one small function each, by what they compute; `table` has them by domain and name."""
