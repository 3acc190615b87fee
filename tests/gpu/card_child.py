"""A stand-in for a broken kernel, and for a foreign process: what it does to a card, by the driver's own interface.

python card_child.py hold GPU-UUID BYTES      holds memory until its standard input ends
python card_child.py hold-amd GPU-UUID BYTES  the same on an AMD card
python card_child.py use FOLDER MODEL         runs the pack in a folder, prints how far it is from the model on the CPU
(as a child of the farm, action `illegal`)    writes to an address that is nobody's
(as a child of the farm, action `too-much`)   takes more memory of an AMD card than there is
(as a child of the farm, action `reach`)      starts CUDA or HIP, and tries to reach what is not its own
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


BROKEN = b'extern "C" __global__ void broken() { *(volatile int*)64 = 1; }'


def hip():
    """Open HIP's runtime; its first card is the one that is visible."""
    given = filter(None, [os.environ.get("HIP_STANDIN")])
    for name in (*given, "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.hipGetErrorString.restype = ctypes.c_char_p
        asked(library, library.hipInit(0))
        asked(library, library.hipSetDevice(0))
        return library
    raise RuntimeError("HIP's runtime (libamdhip64) is not here")


def asked(library, result):
    if result:
        raise RuntimeError(f"Gpu failure {result}: {library.hipGetErrorString(result).decode()}")


def hold_amd(size):
    library, pointer = hip(), ctypes.c_void_p()
    asked(library, library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)))
    print("holding", flush=True)
    sys.stdin.read()


def too_much(request, messages):
    """Take twice the memory that there is, as a model that is too large does; the error is HIP's own."""
    messages.phase("compiling", None, "too much memory")
    library, pointer, left, total = hip(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    asked(library, library.hipMemGetInfo(ctypes.byref(left), ctypes.byref(total)))
    if result := library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(2 * total.value)):
        raise RuntimeError(f"Gpu allocation failed: {library.hipGetErrorString(result).decode()}")
    return {}


def illegal_amd(arch):
    """Build a broken kernel by hiprtc and run it: the runtime ends the process, or says what is wrong."""
    library, compiler = hip(), ctypes.CDLL(next(iter(rtc_names())))
    source, size = ctypes.c_void_p(), ctypes.c_size_t()
    compiler.hiprtcCreateProgram(ctypes.byref(source), BROKEN, b"broken.hip", 0, None, None)
    options = (ctypes.c_char_p * 1)(f"--offload-arch={arch}".encode())
    if compiler.hiprtcCompileProgram(source, 1, options):
        raise RuntimeError("hiprtc does not compile the broken kernel")
    compiler.hiprtcGetCodeSize(source, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    compiler.hiprtcGetCode(source, code)
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    asked(library, library.hipModuleLoadData(ctypes.byref(module), code))
    asked(library, library.hipModuleGetFunction(ctypes.byref(kernel), module, b"broken"))
    asked(library, library.hipModuleLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    asked(library, library.hipDeviceSynchronize())


def rtc_names():
    for name in ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so", "/opt/rocm/lib/libhiprtc.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        yield name
    raise RuntimeError("HIP's compiler (libhiprtc) is not here")


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
    if request["maker"] == "amd":
        illegal_amd(request["arch"])
        return {}
    cuda, module, kernel = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    call(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
    call(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"broken"))
    call(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    call(cuda.cuCtxSynchronize())
    return {}


def reach(request, messages):
    """Start CUDA or HIP and allocate on the card, if there is one; then do what hostile children do."""
    import hostile_child

    messages.phase("compiling", None, "a hostile compiler")
    pointer = ctypes.c_void_p()
    if request["start"] == "nvidia":
        call(driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)))
    elif request["start"] == "amd":
        library = hip()
        asked(library, library.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)))
    probes = hostile_child.do_reach(request, messages)["probes"]
    return {"started": request["start"], "probes": probes, "ipc": hostile_child.do_ipc(request, messages)}


def work(request, messages):
    return {"illegal": illegal, "reach": reach, "too-much": too_much}[request["action"]](request, messages)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[2]
        hold(int(sys.argv[3]))
    elif sys.argv[1] == "hold-amd":
        os.environ["ROCR_VISIBLE_DEVICES"] = sys.argv[2]
        hold_amd(int(sys.argv[3]))
    elif sys.argv[1] == "use":
        use(*sys.argv[2:])
    else:
        import child

        sys.exit(child.start(work))
