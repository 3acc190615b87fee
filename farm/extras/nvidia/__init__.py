"""NVIDIA's GPUs, by ONNX Runtime's CUDA and TensorRT providers. TensorRT is written to its documents, and never ran."""
