// A driver and a runtime library of CUDA without a GPU: memory is the CPU's, modules are libraries of
// emulated kernels (tests/cuda_gpu.py makes them), streams run at once. A graph keeps the launches
// that were captured, with copies of their arguments.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {
struct Function {
  const char* (*run)(const unsigned*, const unsigned*, unsigned, void**);
  const size_t* (*sizes)(int*);
};
struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned count;
};
struct Launch {
  Function* function;
  Config config;
  std::vector<std::vector<char>> arguments;
};
using Graph = std::vector<Launch>;

int run(Function* function, const Config& c, void** arguments) {
  const char* said = function->run(c.grid, c.block, c.shared, arguments);
  if (said && *said) fprintf(stderr, "emulated kernel: %s\n", said);
  return said && *said ? 719 : 0;
}
}  // namespace

extern "C" {
Graph*& fake_capturing();  // the one of the driver, for both
int cuDeviceGetAttribute(int*, int, int);

#ifdef DRIVER
Graph*& fake_capturing() {
  static Graph* graph = nullptr;
  return graph;
}
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int) { return *device = 0, 0; }
int cuDeviceGetAttribute(int* value, int which, int) {
  const char* arch = getenv("BNNCC_FAKE_GPU");
  const int number = arch ? atoi(arch) : 80;
  return *value = which == 75 ? number / 10 : number % 10, 0;
}
int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "emulated"), 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuGetErrorName(int, const char** text) { return *text = "an error", 0; }
int cuGetErrorString(int, const char** text) { return *text = "an error", 0; }
int cuTensorMapEncodeTiled() { return 1; }
int cuModuleUnload(void*) { return 0; }
int cuModuleLoadData(void** module, const void* image) {
  const char* path = (const char*)image;
  if (strncmp(path, "EMULATED:", 9)) return 200;
  *module = dlopen(path + 9, RTLD_NOW | RTLD_LOCAL);
  if (!*module) fprintf(stderr, "%s\n", dlerror());
  return *module ? 0 : 200;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  const std::string text = name;
  auto* made = new Function;
  made->run = (decltype(made->run))dlsym(module, ("run_" + text).c_str());
  made->sizes = (decltype(made->sizes))dlsym(module, ("sizes_" + text).c_str());
  *function = made;
  return made->run && made->sizes ? 0 : 500;
}
int cuLaunchKernelEx(const Config* config, Function* function, void** arguments, void**) {
  if (!fake_capturing()) return run(function, *config, arguments);
  int count = 0;
  const size_t* sizes = function->sizes(&count);
  Launch launch{function, *config, {}};
  for (int i = 0; i < count; ++i)
    launch.arguments.emplace_back((char*)arguments[i], (char*)arguments[i] + sizes[i]);
  fake_capturing()->push_back(launch);
  return 0;
}

#else  // the runtime library
int cudaGetDeviceCount(int* count) { return *count = 1, 0; }
int cudaGetDevice(int* device) { return *device = 0, 0; }
int cudaSetDevice(int) { return 0; }
int cudaDeviceGetAttribute(int* value, int which, int device) {
  if (which == 75 || which == 76) return cuDeviceGetAttribute(value, which, device);
  return *value = 1024, 0;
}
int cudaGetDeviceProperties(void* properties, int) { return memset(properties, 0, 256), 0; }
const char* cudaGetErrorName(int) { return "an error"; }
const char* cudaGetErrorString(int) { return "an error"; }
int cudaGetLastError() { return 0; }
int cudaPeekAtLastError() { return 0; }
int cudaMalloc(void** to, size_t size) { return posix_memalign(to, 256, size ? size : 1); }
int cudaMallocHost(void** to, size_t size) { return cudaMalloc(to, size); }
int cudaFree(void* from) { return free(from), 0; }
int cudaFreeHost(void* from) { return free(from), 0; }
int cudaMemGetInfo(size_t* left, size_t* all) { return *left = *all = size_t(1) << 30, 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t size, int, void*) {
  return memcpy(to, from, size), 0;
}
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void*) {
  return memcpy(to, from, size), 0;
}
int cudaStreamCreate(void** stream) { return *stream = malloc(1), 0; }
int cudaStreamCreateWithFlags(void** stream, unsigned) { return *stream = malloc(1), 0; }
int cudaStreamDestroy(void* stream) { return free(stream), 0; }
int cudaStreamSynchronize(void*) { return 0; }
int cudaStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cudaStreamBeginCapture(void*, int) { return fake_capturing() = new Graph, 0; }
int cudaStreamEndCapture(void*, void** graph) {
  return *graph = fake_capturing(), fake_capturing() = nullptr, 0;
}
int cudaGraphInstantiate(void** made, void* graph, unsigned long long) {
  return *made = new Graph(*(Graph*)graph), 0;
}
int cudaGraphDestroy(void* graph) { return delete (Graph*)graph, 0; }
int cudaGraphExecDestroy(void* graph) { return delete (Graph*)graph, 0; }
int cudaGraphLaunch(void* graph, void*) {
  if (getenv("BNNCC_FAKE_GPU_LOG"))
    fprintf(stderr, "graph of %d launches\n", int(((Graph*)graph)->size()));
  for (Launch& launch : *(Graph*)graph) {
    std::vector<void*> arguments;
    for (auto& bytes : launch.arguments) arguments.push_back(bytes.data());
    if (int failed = run(launch.function, launch.config, arguments.data())) return failed;
  }
  return 0;
}
int cudaEventCreate(void** event) { return *event = malloc(1), 0; }
int cudaEventDestroy(void* event) { return free(event), 0; }
int cudaEventRecord(void*, void*) { return 0; }
int cudaEventSynchronize(void*) { return 0; }
int cudaEventElapsedTime(float* ms, void*, void*) { return *ms = 1, 0; }
#endif
}
