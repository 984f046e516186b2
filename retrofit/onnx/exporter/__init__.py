"""Models as ONNX files, compared with torch."""
