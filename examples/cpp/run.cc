// Runs a compiled network without Python: TVM's runtime, the artifact's lib.so, and raw files.
//
//   run lib.so TYPE SHAPE in.raw out.raw      for example: run lib.so float32 1x1x28x28 x.raw y.raw
//
// For a network of one input. Outputs are written one behind the other, in the manifest's order.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <sstream>
#include <vector>

#if defined(__linux__) && defined(__x86_64__)
#include <unistd.h>
#endif

namespace ffi = tvm::ffi;

// Linux lets a process use AMX tiles once it has asked: arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA.
// Code for x86-64-v4-amx needs this, also `native` on a processor with tiles. Elsewhere it fails,
// and nothing depends on it.
void AskForTiles() {
#if defined(__linux__) && defined(__x86_64__)
  (void)syscall(158, 0x1023, 18);
#endif
}

struct Aligned {  // TVM's code wants tensors to start at a multiple of 64 bytes
  void AllocData(DLTensor* t) { t->data = aligned_alloc(64, (ffi::GetDataSize(*t) + 63) / 64 * 64); }
  void FreeData(DLTensor* t) { free(t->data); }
};

int Run(char** argv) {
  // 1. The library is an executable of TVM's virtual machine: load it, and start one on the CPU.
  const ffi::Module library = ffi::Module::LoadFromFile(argv[1]);
  const auto vm = library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  const int cpu = kDLCPU, pooled = 2;
  vm->GetFunction("vm_initialization").value()(cpu, 0, pooled, cpu, 0, pooled);

  // 2. The input.
  std::vector<int64_t> shape;
  std::istringstream dims(argv[3]);
  for (std::string dim; std::getline(dims, dim, 'x');) shape.push_back(std::stoll(dim));
  ffi::Tensor input = ffi::Tensor::FromNDAlloc(Aligned(), ffi::Shape(shape),
                                               ffi::StringToDLDataType(argv[2]), {kDLCPU, 0});
  std::ifstream in(argv[4], std::ios::binary);
  const auto size = static_cast<std::streamsize>(ffi::GetDataSize(input));
  if (!in.read(static_cast<char*>(input.data_ptr()), size) || in.peek() != EOF)
    return fprintf(stderr, "error: %s does not hold %ld bytes\n", argv[4], long(size)), 1;

  // 3. Run; the result is a tensor, or an array of them.
  const ffi::Any result = vm->GetFunction("main").value()(input);
  std::vector<ffi::Tensor> outputs;
  if (auto one = result.as<ffi::Tensor>()) outputs.push_back(*one);
  else for (const ffi::Any& item : result.cast<ffi::Array<ffi::Any>>()) outputs.push_back(item.cast<ffi::Tensor>());
  std::ofstream out(argv[5], std::ios::binary);
  for (const ffi::Tensor& t : outputs)
    out.write(static_cast<const char*>(t.data_ptr()), std::streamsize(ffi::GetDataSize(t)));
  return out.flush() ? 0 : (fprintf(stderr, "error: cannot write %s\n", argv[5]), 1);
}

int main(int argc, char** argv) {
  AskForTiles();
  if (argc != 6) return fprintf(stderr, "usage: %s lib.so TYPE SHAPE in.raw out.raw\n", argv[0]), 2;
  try {
    return Run(argv);
  } catch (const std::exception& error) {
    return fprintf(stderr, "error: %s\n", error.what()), 1;
  }
}
