/* Stand-ins for MIGraphX's C library and for HIP's runtime, with which ONNX Runtime's MIGraphX provider names the file
   of its cache that it would load or write, on a machine without either. They compile nothing and reach no GPU. What is
   not here does nothing and succeeds: `provider_cache.py` adds it, by the names that the provider asks for. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char thing[4096]; /* every handle is this one */

static void note(const char *what, const char *name) {
  const char *path = getenv("STANDINS_RECORD");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s\t%s\n", what, name);
  fclose(file);
}

#define MADE(name) int name(void **made) { *made = thing; return 0; }
#define EMPTY(name) int name(size_t *size) { *size = 0; return 0; }

MADE(migraphx_argument_create)
MADE(migraphx_compile_options_create)
MADE(migraphx_file_options_create)
MADE(migraphx_onnx_options_create)
MADE(migraphx_parse_onnx_buffer)
MADE(migraphx_program_create)
MADE(migraphx_program_get_output_shapes)
MADE(migraphx_program_get_parameter_shapes)
MADE(migraphx_program_parameters_create)
MADE(migraphx_quantize_fp8_options_create)
MADE(migraphx_quantize_int8_options_create)
MADE(migraphx_shape_create_scalar)
MADE(migraphx_target_create)
EMPTY(migraphx_arguments_size)
EMPTY(migraphx_program_parameter_shapes_size)
EMPTY(migraphx_shapes_size)

int migraphx_program_compile(void) { note("compile", "-"); return 0; }
int migraphx_load(void **program, const char *name) { note("load", name); *program = thing; return 0; }
int migraphx_save(void *program, const char *name) { note("save", name); return 0; }

int hipGetDevice(int *device) { *device = 0; return 0; }
int hipGetDeviceCount(int *count) { *count = 1; return 0; }
const char *hipGetErrorString(int error) { return "no error of a stand-in"; }
int hipStreamCreateWithFlags(void **stream, unsigned flags) { *stream = thing; return 0; }
int hipMalloc(void **place, size_t size) { *place = malloc(size); return !*place; }
int hipHostMalloc(void **place, size_t size, unsigned flags) { *place = malloc(size); return !*place; }
int hipFree(void *place) { free(place); return 0; }
int hipHostFree(void *place) { free(place); return 0; }

int hipGetDevicePropertiesR0600(char *properties, int device) {
  const char *arch = getenv("STANDINS_ARCH");
  memset(properties, 0, 1472); /* sizeof(hipDeviceProp_t) since ROCm 6; gcnArchName begins at 1160 */
  strncpy(properties + 1160, arch ? arch : "", 255);
  return 0;
}
