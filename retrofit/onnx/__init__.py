"""ONNX files: export and import."""
