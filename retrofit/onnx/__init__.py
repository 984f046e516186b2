"""Models to ONNX files and back: export, cleaning and running; import, operator by operator."""
