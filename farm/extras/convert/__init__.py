"""Models that no compiler reads, made into ONNX or a frozen graph by their submitter, and models of a hub."""
