"""A stand-in for a broken kernel, and for a foreign process: what it does to a card, by the driver's own interface.

python card_child.py hold GPU-UUID BYTES      holds memory until its standard input ends
python card_child.py use FOLDER MODEL         runs the pack in a folder, prints how far it is from the model on the CPU
(as a child of the farm, action `illegal`)    writes to an address that is nobody's
(as a child of the farm, action `reach`)      starts CUDA, and tries to reach what is not its own
"""

import ctypes
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "farm" / "runner"), str(ROOT / "tests" / "support")]

PTX = b"""
.version 7.0
.target sm_50
.address_size 64
.visible .entry broken() { .reg .u64 %a; .reg .u32 %v; mov.u64 %a, 64; mov.u32 %v, 1; st.global.u32 [%a], %v; ret; }
"""


def driver():
    """Open the first card that is visible."""
    cuda = ctypes.CDLL("libcuda.so.1")
    call(cuda.cuInit(0))
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call(cuda.cuDeviceGet(ctypes.byref(device), 0))
    call(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    call(cuda.cuCtxSetCurrent(context))
    return cuda


def call(result):
    if result:
        raise RuntimeError(f"CUDA failure {result}: by the driver's interface")


def hold(size):
    cuda, pointer = driver(), ctypes.c_void_p()
    call(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
    print("holding", flush=True)
    sys.stdin.read()


def use(folder, model):
    import runpy

    import numpy as np
    import onnxruntime

    session = runpy.run_path(str(Path(folder) / "use.py"))["session"]
    [described] = session.get_inputs()
    feeds = {described.name: np.random.default_rng(5).standard_normal(described.shape).astype(np.float32)}
    [found] = session.run(None, feeds)
    [wanted] = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    print(float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)))


def illegal(request, messages):
    """Load a kernel that is broken and run it; what the driver says of it is the error."""
    messages.phase("compiling", None, "a broken kernel")
    cuda, module, kernel = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    call(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
    call(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"broken"))
    call(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    call(cuda.cuCtxSynchronize())
    return {}


def reach(request, messages):
    """Start CUDA and allocate on the card, if there is one; then do what hostile children do."""
    import hostile_child

    messages.phase("compiling", None, "a hostile compiler")
    if request["cuda"]:
        pointer = ctypes.c_void_p()
        call(driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)))
    probes = hostile_child.do_reach(request, messages)["probes"]
    return {"cuda": request["cuda"], "probes": probes, "ipc": hostile_child.do_ipc(request, messages)}


def work(request, messages):
    return {"illegal": illegal, "reach": reach}[request["action"]](request, messages)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[2]
        hold(int(sys.argv[3]))
    elif sys.argv[1] == "use":
        use(*sys.argv[2:])
    else:
        import child

        sys.exit(child.start(work))
