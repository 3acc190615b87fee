"""The whole farm on a machine with NVIDIA cards: `make gpu-test`, or `python -m tests.gpu`."""
