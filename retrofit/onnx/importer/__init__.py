"""ONNX files as graph modules that train."""
