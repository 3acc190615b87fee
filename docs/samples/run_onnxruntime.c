/* Opens a program in ONNX Runtime, runs it once and prints what came out:
 *
 *   run_onnxruntime cpu/net--onnxruntime-cpu--fp32--b8.onnx      a program of ONNX Runtime's own
 *   run_onnxruntime pack/model.onnx pack/cache                   a pack `onnxruntime-cache`, with the MIGraphX provider
 *
 * With a cache it opens no session on the CPU in silence: it ends with an error if the provider leaves a node to it.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <onnxruntime_c_api.h>

static const OrtApi* ort;

static void require(OrtStatus* status)
{
    if(status == NULL)
        return;
    fprintf(stderr, "%s\n", ort->GetErrorMessage(status));
    exit(1);
}

static OrtSessionOptions* options_for(const char* cache)
{
    OrtSessionOptions* options = NULL;
    require(ort->CreateSessionOptions(&options));
    if(cache != NULL)
    {
        const char* keys[]   = {"migraphx_model_cache_dir"};
        const char* values[] = {cache};
        require(ort->AddSessionConfigEntry(options, "session.disable_cpu_ep_fallback", "1"));
        require(ort->SessionOptionsAppendExecutionProvider(options, "MIGraphX", keys, values, 1));
    }
    return options;
}

/* Memory for one input: 0.5 in each place of a float32, else zeros. The program has fixed sizes. */
static OrtValue* input_value(const OrtSession* session, size_t index, const OrtMemoryInfo* memory, const char* name)
{
    OrtTypeInfo* type                     = NULL;
    const OrtTensorTypeAndShapeInfo* info = NULL;
    ONNXTensorElementDataType element;
    size_t rank = 0, count = 0;
    int64_t sizes[16];
    OrtValue* value = NULL;
    require(ort->SessionGetInputTypeInfo(session, index, &type));
    require(ort->CastTypeInfoToTensorInfo(type, &info));
    require(ort->GetTensorElementType(info, &element));
    require(ort->GetDimensionsCount(info, &rank));
    if(rank > 16)
        exit(1);
    require(ort->GetDimensions(info, sizes, rank));
    require(ort->GetTensorShapeElementCount(info, &count));
    char* buffer = calloc(count ? count : 1, 8); /* no type of ours takes more than 8 bytes */
    if(element == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
        for(size_t i = 0; i < count; i++)
            ((float*)buffer)[i] = 0.5f;
    printf("input %s: %zu values\n", name, count);
    size_t width = element == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? sizeof(float) : 8;
    require(ort->CreateTensorWithDataAsOrtValue(memory, buffer, count * width, sizes, rank, element, &value));
    ort->ReleaseTypeInfo(type);
    return value;
}

static void print_output(OrtValue* value, const char* name)
{
    OrtTensorTypeAndShapeInfo* info = NULL;
    ONNXTensorElementDataType element;
    size_t count = 0;
    require(ort->GetTensorTypeAndShape(value, &info));
    require(ort->GetTensorElementType(info, &element));
    require(ort->GetTensorShapeElementCount(info, &count));
    printf("output %s: %zu values", name, count);
    if(element == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
    {
        float* values = NULL;
        double sum    = 0;
        require(ort->GetTensorMutableData(value, (void**)&values));
        for(size_t i = 0; i < count; i++)
            sum += values[i];
        printf(", sum %g", sum);
    }
    printf("\n");
    ort->ReleaseTensorTypeAndShapeInfo(info);
}

int main(int argc, char** argv)
{
    enum { MOST = 64 };
    OrtEnv* env             = NULL;
    OrtSession* session     = NULL;
    OrtMemoryInfo* memory   = NULL;
    OrtAllocator* allocator = NULL;
    size_t inputs = 0, outputs = 0;
    char *in[MOST], *out[MOST];
    OrtValue *given[MOST], *made[MOST] = {NULL};

    if(argc != 2 && argc != 3)
    {
        fprintf(stderr, "usage: %s MODEL [CACHE]\n", argv[0]);
        return 2;
    }
    ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if(ort == NULL)
    {
        fprintf(stderr, "this ONNX Runtime (%s) is older than its header\n", OrtGetApiBase()->GetVersionString());
        return 1;
    }
    require(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "farm", &env));
    require(ort->CreateSession(env, argv[1], options_for(argc == 3 ? argv[2] : NULL), &session));
    require(ort->GetAllocatorWithDefaultOptions(&allocator));
    require(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
    require(ort->SessionGetInputCount(session, &inputs));
    require(ort->SessionGetOutputCount(session, &outputs));
    if(inputs > MOST || outputs > MOST)
        return 1;
    for(size_t i = 0; i < inputs; i++)
    {
        require(ort->SessionGetInputName(session, i, allocator, &in[i]));
        given[i] = input_value(session, i, memory, in[i]);
    }
    for(size_t i = 0; i < outputs; i++)
        require(ort->SessionGetOutputName(session, i, allocator, &out[i]));
    require(ort->Run(session, NULL, (const char* const*)in, (const OrtValue* const*)given, inputs, (const char* const*)out,
                     outputs, made));
    for(size_t i = 0; i < outputs; i++)
        print_output(made[i], out[i]);
    return 0;
}
