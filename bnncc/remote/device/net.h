// Sockets with time limits, and the messages of TVM's RPC handshake: a length, then that many bytes.
#pragma once

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

namespace net {

constexpr int32_t kMagic = 0xFF271;
constexpr int32_t kBusy = kMagic + 1;      // followed by a text; TVM's "duplicate"
constexpr int32_t kMismatch = kMagic + 2;  // no client with this key now
constexpr int32_t kTrackerMagic = 0x2F271;
constexpr int32_t kMaxText = 1 << 20;

inline bool SendAll(int fd, const void* data, size_t size) {
  for (auto at = static_cast<const char*>(data); size > 0;) {
    const ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n, size -= static_cast<size_t>(n);
  }
  return true;
}

inline bool ReceiveAll(int fd, void* data, size_t size) {
  for (auto at = static_cast<char*>(data); size > 0;) {
    const ssize_t n = recv(fd, at, size, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n, size -= static_cast<size_t>(n);
  }
  return true;
}

inline bool SendText(int fd, const std::string& text) {
  const auto size = static_cast<int32_t>(text.size());
  return SendAll(fd, &size, sizeof size) && SendAll(fd, text.data(), text.size());
}

inline bool ReceiveText(int fd, std::string* text) {
  int32_t size = 0;
  if (!ReceiveAll(fd, &size, sizeof size) || size < 0 || size > kMaxText) return false;
  text->resize(static_cast<size_t>(size));
  return ReceiveAll(fd, text->data(), text->size());
}

inline void LimitTime(int fd, int receive_seconds, int send_seconds) {
  timeval limit{receive_seconds, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  limit.tv_sec = send_seconds;
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // bounds connect() too
}

// Notices within half a minute that the other machine, or the way to it, is gone.
inline void KeepAlive(int fd) {
  const int on = 1, idle = 10, interval = 5, count = 4, unanswered = 30000;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered, sizeof unanswered);
}

// Calls use(socket, address) for each address of `host` until it succeeds; returns that socket or -1.
template <typename Use>
int Open(const std::string& host, int port, int flags, Use use) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return -1;
  int result = -1;
  for (addrinfo* a = found; a != nullptr && result < 0; a = a->ai_next) {
    const int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd < 0) continue;
    if (use(fd, *a)) result = fd;
    else close(fd);
  }
  freeaddrinfo(found);
  return result;
}

inline int Connect(const std::string& host, int port, int seconds) {
  return Open(host, port, 0, [&](int fd, const addrinfo& a) {
    LimitTime(fd, seconds, seconds);
    return connect(fd, a.ai_addr, a.ai_addrlen) == 0;
  });
}

inline int Listen(const std::string& host, int port) {
  return Open(host, port, AI_PASSIVE, [&](int fd, const addrinfo& a) {
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    return bind(fd, a.ai_addr, a.ai_addrlen) == 0 && listen(fd, 16) == 0;
  });
}

inline int LocalPort(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  char port[16] = "0";
  getnameinfo(reinterpret_cast<sockaddr*>(&address), size, nullptr, 0, port, sizeof port,
              NI_NUMERICSERV);
  return std::stoi(port);
}

inline std::string Peer(const sockaddr_storage& address, socklen_t size) {
  char host[128] = "?", port[16] = "?";
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host, sizeof host, port,
              sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  return std::string(host) + ":" + port;
}

}  // namespace net
