#!/bin/sh
# Starts Triton with this repository.
here=$(cd "$(dirname "$0")" && pwd)
{environment}exec tritonserver --model-repository="$here/models" "$@"
