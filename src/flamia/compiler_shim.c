// What launchers exported by the CuTe DSL 4.8 call and its static runtime leaves out: turning CUDA errors into errors of
// the caller. Linked into every kernel library.
#include <stdint.h>
#include <stdio.h>

#define HIDDEN __attribute__((visibility("hidden")))

extern const char *cudaGetErrorName(int32_t code);
extern const char *cudaGetErrorString(int32_t code);

typedef void (*raise_function)(const char *kind, const char **pieces, int32_t count);

HIDDEN void CuteDSLRT_TVMFFISetRaisedCudaError(raise_function raise, int32_t code) {
  char number[32];
  snprintf(number, sizeof(number), "CUDA error %d, ", (int)code);
  const char *pieces[] = {number, cudaGetErrorName(code), ": ", cudaGetErrorString(code)};
  if (raise) raise("RuntimeError", pieces, 4);
}

// Called only by launchers compiled with the DSL's debug checks: sizes of the launch, limits of the device, and which
// of them was violated.
HIDDEN void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    raise_function raise, int32_t grid_x, int32_t grid_y, int32_t grid_z, int32_t block_x, int32_t block_y,
    int32_t block_z, int32_t block_threads, int64_t shared, int32_t device, int32_t most_threads, int32_t most_block_x,
    int32_t most_block_y, int32_t most_block_z, int32_t most_grid_x, int32_t most_grid_y, int32_t most_grid_z,
    int32_t most_shared, int32_t most_shared_optin, const char *violation, const char *file, int32_t line,
    int32_t column, int32_t end_column) {
  char sizes[160];
  snprintf(sizes, sizeof(sizes), " (grid %d x %d x %d, block %d x %d x %d, %lld bytes of shared memory)", (int)grid_x,
           (int)grid_y, (int)grid_z, (int)block_x, (int)block_y, (int)block_z, (long long)shared);
  const char *pieces[] = {"refused launch: ", violation ? violation : "unknown reason", sizes};
  if (raise) raise("RuntimeError", pieces, 3);
}
