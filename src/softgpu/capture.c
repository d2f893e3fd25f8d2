/* The CUDA symbols that the host code of an exported CuTe DSL object calls, without CUDA.
   Linked with such an object, its launcher runs on a CPU: it checks arguments, builds tensor maps, and hands each
   launch (configuration, kernel name, parameter pointers) to a callback. Device queries answer from a small table. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#define API __attribute__((visibility("default")))
typedef int (*launch_callback)(const void *config, const char *kernel, void **parameters);
static launch_callback callback;
static int attributes[256];
/* the last function that was called and is not offered */
API const char *softgpu_refused;
API void softgpu_set_callback(launch_callback f) { callback = f; }
API void softgpu_set_attribute(int which, int value) { if (which >= 0 && which < 256) attributes[which] = value; }

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
  *library = (void *)code; return 0; }
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = strdup(name); return 0; }
int _cudaLibraryUnload(void *library) { return 0; }
int _cuKernelGetAttribute(int *value, int which, void *kernel, int device) { *value = which == 0 ? 1024 : 0; return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int which, int value, int device) { return 0; }
int _cudaDeviceGetAttribute(int *value, int which, int device) {
  *value = which >= 0 && which < 256 ? attributes[which] : 0; return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { return 0; }
int _cudaLaunchKernelEx(const void *config, const void *kernel, void **parameters) {
  return callback ? callback(config, (const char *)kernel, parameters) : 999; }
const char *cuda_dialect_get_error_name(int code) { return "softgpu"; }
int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int), void *error) {
  void *library = 0; int r;
  if (*state) return 0;
  if ((r = init(&library))) return r;
  if (load && (r = load(&library, 0))) return r;
  *state = library; return 0; }
void cuda_dialect_unload_library_once(void **state) {}
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int32_t), int32_t code) {
  char text[64]; const char *parts[1] = {text};
  snprintf(text, sizeof text, "softgpu launch error %d", code);
  raise("RuntimeError", parts, 1); }
