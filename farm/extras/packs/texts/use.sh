#!/bin/sh
# Opens the program as `use.py` does; PYTHON names the interpreter that has ONNX Runtime.
exec "${PYTHON:-python3}" "$(dirname "$0")/use.py" "$@"
