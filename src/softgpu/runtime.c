/* The shared CUDA runtime (libcudart.so) for libraries that were linked with it: what capture.c has, under the
   runtime's own names, and the documented functions that such libraries call beside it. */
#include "capture.c"
#define SAME(name) API __typeof__(_##name) name __attribute__((alias("_" #name)));
SAME(cudaLibraryLoadData) SAME(cudaLibraryGetKernel) SAME(cudaLibraryUnload) SAME(cudaKernelSetAttributeForDevice)
SAME(cudaDeviceGetAttribute) SAME(cudaGetDevice) SAME(cudaSetDevice)
API __typeof__(_cudaLaunchKernelEx) cudaLaunchKernelExC __attribute__((alias("_cudaLaunchKernelEx")));
API int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
API int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
API int cudaGetLastError(void) { return 0; }
API const char *cudaGetErrorName(int code) { return code ? "softgpu" : "cudaSuccess"; }
API const char *cudaGetErrorString(int code) { return code ? "refused by softgpu" : "no error"; }
static int device_handle(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
/* gives driver functions by name; an unknown name has status 1 */
API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, uint64_t flags, int *status) {
  *function = !strcmp(name, "cuKernelGetAttribute") ? (void *)_cuKernelGetAttribute
            : !strcmp(name, "cuDeviceGet") ? (void *)device_handle : 0;
  if (!*function) softgpu_refused = strdup(name);
  if (status) *status = !*function;
  return 0; }
