#!/bin/sh
# Starts Triton with this repository. One server a precision: the cache's variable holds for the whole process, and the
# provider does not tell precisions apart. Its ONNX Runtime must be {version}, which looks for the files in `cache`.
here=$(cd "$(dirname "$0")" && pwd)
export ORT_MIGRAPHX_MODEL_CACHE_PATH="$here/cache"
exec tritonserver --model-repository="$here/models" "$@"
