/* A STAND-IN for the HIP runtime: MIGraphX and MIOpen compile and tune for a GPU that is not there.

   Loaded before libamdhip64 (RTLD_GLOBAL, or LD_PRELOAD). Memory of the GPU is a reserved range of this process's
   addresses, so copies work. Launches do nothing: results are whatever lies there. Events tell invented times, so a
   search ends, and what it finds says nothing about a GPU. A kernel with the name `broken` ends the process in the words
   of ROCm, as a write to nobody's address does.

   Which GPU it plays is in KFD's topology (/sys/class/kfd), where `ROCR_VISIBLE_DEVICES` (GPU-<unique_id>, or an index)
   chooses one. The features of an arch are those that its data-center cards are sold with.

   Built against libamdhip64-dev: gcc -shared -fPIC -w -D__HIP_PLATFORM_AMD__=1 hip_standin.c hip_launches.c -o libhip_standin.so */

#include <hip/hip_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define OK return hipSuccess
#define NODES "/sys/class/kfd/kfd/topology/nodes"

/* --- the GPU ---------------------------------------------------------------------------------------------------- */

static struct {
    int found, units, wave;
    char arch[64];
} gpu;

static unsigned long long property(const char *text, const char *name) {
    char line[64];
    snprintf(line, sizeof line, "\n%s ", name);
    const char *at = strstr(text, line);
    return at ? strtoull(at + strlen(line), 0, 10) : 0;
}

static void look(void) {
    const char *chosen = getenv("ROCR_VISIBLE_DEVICES");
    for (int node = 0, index = 0; node < 64; node++) {
        char path[128], text[8192] = "\n", uuid[64], number[16];
        snprintf(path, sizeof path, NODES "/%d/properties", node);
        FILE *file = fopen(path, "r");
        if (!file)
            continue;
        text[1 + fread(text + 1, 1, sizeof text - 2, file)] = 0;
        fclose(file);
        unsigned version = property(text, "gfx_target_version"), units = property(text, "simd_per_cu");
        if (!version)
            continue;
        snprintf(uuid, sizeof uuid, "GPU-%016llx", property(text, "unique_id"));
        snprintf(number, sizeof number, "%d", index++);
        if (gpu.found || (chosen && strcmp(chosen, uuid) && strcmp(chosen, number)))
            continue;
        gpu.found = 1;
        gpu.units = units ? property(text, "simd_count") / units : 1;
        gpu.wave = version < 100000 ? 64 : 32;
        /* HIP counts RDNA's units by twos. */
        gpu.units /= gpu.wave == 32 ? 2 : 1;
        snprintf(gpu.arch, sizeof gpu.arch, "gfx%u%u%x%s", version / 10000, version / 100 % 100, version % 100,
                 version == 90010 || version == 90402 || version == 90500 ? ":sramecc+:xnack-" : "");
    }
}

__attribute__((constructor)) static void begin(void) {
    look();
    /* Debian's LLVM 21 lacks the intrinsics of MIOpen's kernels of this family, and MIOpen takes that for a failure. */
    setenv("MIOPEN_DEBUG_CONV_IMPLICIT_GEMM_HIP_FWD_V4R4_PADDED_GEMM_XDLOPS", "0", 0);
    setenv("MIOPEN_DEBUG_CONV_IMPLICIT_GEMM_HIP_FWD_V4R4_XDLOPS", "0", 0);
    /* A search of hundreds of kernels that are only compiled shows no more than one of a few. */
    setenv("MIOPEN_DEBUG_TUNING_ITERATIONS_MAX", "4", 0);
}

hipError_t hipGetDeviceCount(int *count) { *count = gpu.found; return gpu.found ? hipSuccess : hipErrorNoDevice; }
hipError_t hipInit(unsigned flags) { return gpu.found ? hipSuccess : hipErrorNoDevice; }
hipError_t hipGetDevice(int *device) { *device = 0; return gpu.found ? hipSuccess : hipErrorNoDevice; }
hipError_t hipSetDevice(int device) { return gpu.found ? hipSuccess : hipErrorNoDevice; }
hipError_t hipDeviceGet(hipDevice_t *device, int ordinal) { *device = 0; OK; }
hipError_t hipCtxGetDevice(hipDevice_t *device) { *device = 0; OK; }
hipError_t hipStreamGetDevice(hipStream_t stream, hipDevice_t *device) { *device = 0; OK; }
hipError_t hipGetDeviceFlags(unsigned *flags) { *flags = 0; OK; }
hipError_t hipRuntimeGetVersion(int *version) { *version = 60443484; OK; }
hipError_t hipDriverGetVersion(int *version) { *version = 60443484; OK; }
hipError_t hipDeviceGetName(char *name, int size, hipDevice_t device) { snprintf(name, size, "stand-in"); OK; }
hipError_t hipDeviceGetPCIBusId(char *name, int size, int device) { snprintf(name, size, "0000:00:00.0"); OK; }

hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600 *found, int device) {
    memset(found, 0, sizeof *found);
    if (!gpu.found)
        return hipErrorNoDevice;
    strcpy(found->name, "stand-in");
    strcpy(found->gcnArchName, gpu.arch);
    found->totalGlobalMem = 64ull << 30;
    found->sharedMemPerBlock = found->sharedMemPerMultiprocessor = found->maxSharedMemoryPerMultiProcessor = 65536;
    found->regsPerBlock = 65536;
    found->warpSize = gpu.wave;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = found->maxThreadsDim[2] = 1024;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->clockRate = 2100000;
    found->memoryClockRate = 1300000;
    found->memoryBusWidth = 8192;
    found->multiProcessorCount = gpu.units;
    found->maxThreadsPerMultiProcessor = 2048;
    found->l2CacheSize = 4 << 20;
    found->major = 9;
    found->cooperativeLaunch = found->managedMemory = found->concurrentKernels = 1;
    OK;
}

hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t which, int device) {
    switch (which) {
    case hipDeviceAttributeMultiprocessorCount: *value = gpu.units; break;
    case hipDeviceAttributeWarpSize: *value = gpu.wave; break;
    case hipDeviceAttributeMaxThreadsPerBlock: *value = 1024; break;
    case hipDeviceAttributeMaxSharedMemoryPerBlock: *value = 65536; break;
    case hipDeviceAttributeClockRate: *value = 2100000; break;
    default: *value = 0;
    }
    OK;
}

/* --- memory ----------------------------------------------------------------------------------------------------- */

#define SPAN (64ull << 30)
static char *base;
static atomic_size_t used;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void reserve(void) {
    base = mmap(0, SPAN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static int is_on_gpu(const void *at) { return base && (char *)at >= base && (char *)at < base + SPAN; }

static hipError_t on_gpu(void **at, size_t size) {
    pthread_once(&once, reserve);
    size = (size + 511) & ~511ull;
    size_t start = atomic_fetch_add(&used, size ? size : 512);
    if (base == MAP_FAILED || start + size > SPAN)
        return hipErrorOutOfMemory;
    *at = base + start;
    OK;
}

static void *on_host(size_t size) {
    void *at = 0;
    size = size ? size : 256;
    return posix_memalign(&at, 256, size) ? 0 : memset(at, 0, size);
}

hipError_t hipMalloc(void **at, size_t size) { return on_gpu(at, size); }
hipError_t hipMallocAsync(void **at, size_t size, hipStream_t stream) { return on_gpu(at, size); }
hipError_t hipExtMallocWithFlags(void **at, size_t size, unsigned flags) { return on_gpu(at, size); }
hipError_t hipFree(void *at) { if (!is_on_gpu(at)) free(at); OK; }
hipError_t hipFreeAsync(void *at, hipStream_t stream) { OK; }
hipError_t hipHostMalloc(void **at, size_t size, unsigned flags) { *at = on_host(size); OK; }
hipError_t hipHostFree(void *at) { free(at); OK; }
hipError_t hipHostRegister(void *at, size_t size, unsigned flags) { OK; }
hipError_t hipHostUnregister(void *at) { OK; }
hipError_t hipHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; OK; }
hipError_t hipMemcpy(void *to, const void *from, size_t size, hipMemcpyKind kind) { memmove(to, from, size); OK; }
hipError_t hipMemcpyAsync(void *to, const void *from, size_t size, hipMemcpyKind kind, hipStream_t stream) { memmove(to, from, size); OK; }
hipError_t hipMemcpyWithStream(void *to, const void *from, size_t size, hipMemcpyKind kind, hipStream_t stream) { memmove(to, from, size); OK; }
hipError_t hipMemset(void *at, int value, size_t size) { memset(at, value, size); OK; }
hipError_t hipMemsetAsync(void *at, int value, size_t size, hipStream_t stream) { memset(at, value, size); OK; }
hipError_t hipMemGetInfo(size_t *left, size_t *total) { *total = SPAN; *left = SPAN - used; OK; }

hipError_t hipPointerGetAttributes(hipPointerAttribute_t *found, const void *at) {
    memset(found, 0, sizeof *found);
    if (!is_on_gpu(at))
        return hipErrorInvalidValue;
    found->type = hipMemoryTypeDevice;
    found->devicePointer = (void *)at;
    OK;
}

/* --- streams, events, code ---------------------------------------------------------------------------------------- */

hipError_t hipStreamCreate(hipStream_t *stream) { *stream = on_host(64); OK; }
hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags) { *stream = on_host(64); OK; }
hipError_t hipStreamCreateWithPriority(hipStream_t *stream, unsigned flags, int priority) { *stream = on_host(64); OK; }
hipError_t hipStreamGetFlags(hipStream_t stream, unsigned *flags) { *flags = 0; OK; }
hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus *status) { *status = hipStreamCaptureStatusNone; OK; }
hipError_t hipEventCreate(hipEvent_t *event) { *event = on_host(64); OK; }
hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags) { *event = on_host(64); OK; }

hipError_t hipEventElapsedTime(float *milliseconds, hipEvent_t from, hipEvent_t to) {
    static unsigned chance = 12345;
    chance = chance * 1103515245 + 12345;
    *milliseconds = 0.05f + (chance >> 16) % 1000 * 1e-4f;
    OK;
}

hipError_t hipModuleLoad(hipModule_t *module, const char *name) { *module = on_host(64); OK; }
hipError_t hipModuleLoadData(hipModule_t *module, const void *image) { *module = on_host(64); OK; }
hipError_t hipModuleLoadDataEx(hipModule_t *module, const void *image, unsigned count, hipJitOption *options, void **values) { *module = on_host(64); OK; }
static char broken[64];
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
    *function = strcmp(name, "broken") ? on_host(64) : (void *)broken;
    OK;
}
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned x, unsigned y, unsigned z, unsigned i, unsigned j, unsigned k,
                                 unsigned shared, hipStream_t stream, void **given, void **more) {
    if ((void *)function == broken) {
        fprintf(stderr, "Memory access fault by GPU node-1 (Agent handle: 0x1) on address (nil). Reason: invented.\n");
        abort();
    }
    OK;
}
hipError_t hipLaunchHostFunc(hipStream_t stream, hipHostFn_t call, void *data) { call(data); OK; }
hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute which, hipFunction_t function) { *value = 1; OK; }
hipError_t hipFuncGetAttributes(hipFuncAttributes *found, const void *function) { memset(found, 0, sizeof *found); found->maxThreadsPerBlock = 1024; OK; }
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int size, size_t shared) { *count = 2; OK; }
const char *hipGetErrorString(hipError_t error) { return error == hipErrorNoDevice ? "no ROCm-capable device is detected" : "an error of the stand-in"; }
const char *hipGetErrorName(hipError_t error) { return error == hipErrorNoDevice ? "hipErrorNoDevice" : "hipErrorUnknown"; }
void **__hipRegisterFatBinary(const void *data) { static void *handle; return &handle; }
