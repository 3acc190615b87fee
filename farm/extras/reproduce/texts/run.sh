#!/bin/sh
# Reruns the attempt. PYTHON is a Python (3.11 or newer) with numpy, onnx and the compiler, python3 if it is unset.
cd "$(dirname "$0")" || exit 2
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "$python is not a Python 3.11 or newer: PYTHON=/path/to/python sh run.sh" >&2
  exit 2
fi
exec "$python" -m farm.extras.reproduce.reproduction "$@"
