// What the machine says about itself: architecture, processor, and its features as Linux spells them.
#pragma once

#include <sched.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#endif
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace machine {

// Returns the value of the first line of /proc/cpuinfo that starts with `key`.
inline std::string CpuInfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t colon = line.find(':');
    return colon == std::string::npos ? "" : line.substr(std::min(colon + 2, line.size()));
  }
  return "";
}

inline std::string Architecture() {
#if defined(__aarch64__)
  return "aarch64";  // of this program: an emulator, or a 64-bit kernel below it, does not matter
#elif defined(__x86_64__)
  return "x86_64";
#else
  utsname name{};
  uname(&name);
  return name.machine;
#endif
}

// Asks Linux for the registers of AMX's tiles, for all threads of this program; x86-64 alone.
inline bool PermitsTiles() {
#if defined(__x86_64__)
  static const bool permits = syscall(158, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return permits;
#else
  return false;
#endif
}

// Returns the features this program may use, separated by spaces. On Arm they come from the kernel's
// own word, because /proc/cpuinfo shows an emulator's host. Tiles have to be asked for.
inline std::string Features() {
#if defined(__aarch64__)
  static const std::pair<unsigned long, const char*> kFirst[] = {
      {HWCAP_FP, "fp"},           {HWCAP_ASIMD, "asimd"},     {HWCAP_AES, "aes"},
      {HWCAP_PMULL, "pmull"},     {HWCAP_SHA1, "sha1"},       {HWCAP_SHA2, "sha2"},
      {HWCAP_CRC32, "crc32"},     {HWCAP_ATOMICS, "atomics"}, {HWCAP_FPHP, "fphp"},
      {HWCAP_ASIMDHP, "asimdhp"}, {HWCAP_ASIMDRDM, "asimdrdm"}, {HWCAP_LRCPC, "lrcpc"},
      {HWCAP_ASIMDDP, "asimddp"}, {HWCAP_ASIMDFHM, "asimdfhm"}, {HWCAP_SVE, "sve"}};
  static const std::pair<unsigned long, const char*> kSecond[] = {
      {1ul << 1, "sve2"}, {1ul << 13, "i8mm"}, {1ul << 14, "bf16"}};  // HWCAP2_*
  std::string result;
  for (const auto& [bit, name] : kFirst)
    if (getauxval(AT_HWCAP) & bit) result += std::string(result.empty() ? "" : " ") + name;
  for (const auto& [bit, name] : kSecond)
    if (getauxval(AT_HWCAP2) & bit) result += std::string(" ") + name;
  return result;
#else
  std::istringstream flags(CpuInfo("flags"));
  std::string result;
  for (std::string flag; flags >> flag;)
    if (flag.compare(0, 4, "amx_") != 0 || PermitsTiles()) result += flag + " ";
  return result;
#endif
}

inline std::string Processor() {
  std::ifstream model("/proc/device-tree/model");
  std::string name;
  if (std::getline(model, name, '\0') && !name.empty()) return name;
  name = CpuInfo("model name");
  return name.empty() ? "unknown" : name;
}

inline int UsableCpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

inline std::string Quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) >= ' ') result += c;
  }
  return result + '"';
}

// Returns everything as one JSON object.
inline std::string Description(const std::string& tvm) {
  return "{\"format\": 1, \"machine\": " + Quoted(Architecture()) + ", \"cpu\": " +
         Quoted(Processor()) + ", \"features\": " + Quoted(Features()) + ", \"tvm\": " + Quoted(tvm) +
         ", \"cpus\": " + std::to_string(UsableCpus()) + "}";
}

}  // namespace machine
