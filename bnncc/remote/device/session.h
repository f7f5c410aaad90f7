// One client's session: a process of its own, which ends with it.
//
// What the client uploads stays in memory (memfd): nothing is left on disk however a session ends.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdlib>
#include <map>
#include <string>

#include "machine.h"
#include "net.h"

namespace session {

namespace ffi = tvm::ffi;

constexpr int kLostClient = 3;  // exit status

// The uploaded files. A file that was loaded stays open: dlopen goes by names, and the name of a
// memfd is that of its number.
class Files {
 public:
  void Write(const std::string& name, const char* data, size_t size) {
    const int fd = memfd_create("bnncc", MFD_CLOEXEC);
    if (fd < 0) TVM_FFI_THROW(RuntimeError) << "memfd_create: " << strerror(errno);
    for (size_t done = 0; done < size;) {
      const ssize_t n = write(fd, data + done, size - done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        close(fd);
        TVM_FFI_THROW(RuntimeError) << "no memory for `" << name << "`, " << size << " bytes";
      }
      done += static_cast<size_t>(n);
    }
    files_[name] = fd;
  }

  std::string Path(const std::string& name) const {
    const auto found = files_.find(name);
    if (found == files_.end()) TVM_FFI_THROW(RuntimeError) << "no file `" << name << "`";
    return "/proc/self/fd/" + std::to_string(found->second);
  }

  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  void Remove(const std::string& name) { files_.erase(name); }

 private:
  std::map<std::string, int> files_;
};

// Returns the first of the modules `module` imports that has a function `name`: the kernels of a
// network are in the library its executable imports.
inline ffi::Module Owner(const ffi::Module& module, const std::string& name) {
  for (const ffi::Any& item : module->imports()) {
    const auto imported = item.cast<ffi::Module>();
    if (imported->ImplementsFunction(name)) return imported;
  }
  TVM_FFI_THROW(RuntimeError) << "no kernel `" << name << "`";
}

template <typename F>
void Offer(const char* name, F function) {
  ffi::Function::SetGlobal(name, ffi::Function::FromTyped(function), true);
}

// Defines what TVM's protocol asks of a server, and what bnncc's client asks beyond that.
inline void OfferFunctions(const std::string& tvm_version) {
  static Files files;
  Offer("tvm.rpc.server.upload", [](ffi::String name, ffi::Bytes data) {
    files.Write(name, data.data(), data.size());
  });
  Offer("tvm.rpc.server.download", [](ffi::String name) { return ffi::Bytes(files.Read(name)); });
  Offer("tvm.rpc.server.remove", [](ffi::String name) { files.Remove(name); });
  Offer("tvm.rpc.server.workpath", [](ffi::String name) { return ffi::String(files.Path(name)); });
  Offer("tvm.rpc.server.load_module", [](ffi::String name) {
    static const auto load = ffi::Function::GetGlobalRequired("ffi.Module.load_from_file.so");
    return load(files.Path(name), "so").cast<ffi::Module>();
  });
  Offer("bnncc.device_info",
        [tvm_version]() { return ffi::String(machine::Description(tvm_version)); });
  Offer("bnncc.set_threads", [](int64_t count) {  // before the first kernel runs
    setenv("TVM_NUM_THREADS", std::to_string(count).c_str(), 1);
  });
  Offer("bnncc.kernel_owner",
        [](ffi::Module module, ffi::String name) { return Owner(module, name); });
}

// Serves a client; the process of the session ends here.
[[noreturn]] inline void Serve(int client, int idle_seconds, unsigned whole_seconds) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  setpgid(0, 0);
  for (const int number : {SIGCHLD, SIGTERM, SIGINT, SIGHUP}) signal(number, SIG_DFL);
  setenv("TVM_NUM_THREADS", std::to_string(machine::UsableCpus()).c_str(), 0);
  setenv("TVM_THREAD_POOL_SPIN_COUNT", "10000", 0);  // as on the machine of bnncc
  setenv("TVM_BIND_THREADS", "0", 0);  // TVM would bind to cores this process may not use
  net::LimitTime(client, idle_seconds, idle_seconds);
  net::KeepAlive(client);
  if (whole_seconds > 0) alarm(whole_seconds);
  try {
    ffi::Function::GetGlobalRequired("rpc.ServerLoop")(static_cast<int64_t>(client));
  } catch (const std::exception&) {
    _exit(kLostClient);
  }
  _exit(0);
}

}  // namespace session
