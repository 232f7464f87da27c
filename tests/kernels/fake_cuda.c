/* A CUDA driver for tests without a GPU: it launches nothing, and remembers what each launch was given.

   Triton's own driver, launcher and compiler run on top of it as they do on a GPU. A tensor map holds the arguments it
   was made from, so that two maps are equal iff they describe the same box of the same memory. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PARAMETERS 256
#define MAP_BYTES 128

typedef int Result;

static intptr_t functions = 0;
static int recording = 0, maps = 0;
static int sizes[4096][MOST_PARAMETERS], counts[4096];  /* bytes of the parameters of a function */
static uint8_t *record = NULL;
static size_t used = 0, room = 0;

static void keep(const void *bytes, size_t count) {
  if (used + count > room) record = realloc(record, room = 2 * room + count);
  memcpy(record + used, bytes, count);
  used += count;
}

/* For the test, by ctypes. */
void fake_parameters(intptr_t function, int count, const int *bytes) {
  counts[function] = count;
  memcpy(sizes[function], bytes, count * sizeof(int));
}
void fake_record(int on) { recording = on, used = 0; }
const uint8_t *fake_recorded(size_t *count) { return *count = used, record; }
int fake_maps(void) { return maps; }

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *version) { return *version = 13000, 0; }
Result cuDeviceGetCount(int *count) { return *count = 1, 0; }
Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 232448, 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &functions, 0; }
Result cuCtxGetCurrent(void **context) { return *context = &functions, 0; }
Result cuCtxSetCurrent(void *context) { return 0; }
Result cuCtxGetDevice(int *device) { return *device = 0, 0; }
Result cuCtxGetLimit(size_t *value, int limit) { return *value = 0, 0; }
Result cuCtxSetLimit(int limit, size_t value) { return 0; }
Result cuGetErrorString(int error, const char **text) { return *text = "an error of the fake driver", 0; }
Result cuModuleLoadData(void **module, const void *image) { return *module = &functions, 0; }
Result cuModuleUnload(void *module) { return 0; }
Result cuModuleGetFunction(intptr_t *function, void *module, const char *name) { return *function = ++functions, 0; }
Result cuFuncGetAttribute(int *value, int attribute, intptr_t function) { return *value = attribute == 0 ? 1024 : 0, 0; }
Result cuFuncSetAttribute(intptr_t function, int attribute, int value) { return 0; }
Result cuFuncSetCacheConfig(intptr_t function, int config) { return 0; }
Result cuOccupancyMaxActiveClusters(int *count, intptr_t function, const void *config) { return *count = 1, 0; }
Result cuStreamIsCapturing(void *stream, int *capturing) { return *capturing = 0, 0; }
Result cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) { return *(uint64_t *)data = pointer, 0; }
Result cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t pointer) { return 0; }

Result cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *shape,
                              const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                              int swizzle, int promotion, int fill) {
  uint64_t words[MAP_BYTES / 8] = {type | rank << 8 | swizzle << 16 | promotion << 20 | fill << 24, (uint64_t)address};
  for (uint32_t dim = 0; dim < rank; dim++) {
    words[2 + dim] = shape[dim];
    words[7 + dim] = dim + 1 < rank ? strides[dim] : 0;
    words[11] = words[11] * 257 + box[dim];
  }
  memcpy(map, words, MAP_BYTES);
  maps++;
  return 0;
}
Result cuTensorMapEncodeIm2col(void) { return 1; }

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
} Config;

Result cuLaunchKernelEx(const Config *config, intptr_t function, void **parameters, void **extra) {
  if (!recording) return 0;
  keep(&function, sizeof(function));
  keep(config->grid, sizeof(config->grid) + sizeof(config->block) + sizeof(config->shared));
  keep(&config->stream, sizeof(config->stream));
  for (int i = 0; i < counts[function]; i++) keep(parameters[i], sizes[function][i]);
  return 0;
}
