// The device's side of `bnncc deploy`: TVM's RPC protocol without Python, one client at a time.
//
// Each client gets a forked process (session.h), so that whatever it runs cannot take the server
// along; a second client is told that the device is busy; a client that says nothing is dropped.
// Whoever can connect can run code here: trusted networks only.
#include <dlfcn.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <sys/wait.h>

#include <cctype>
#include <cstdio>
#include <list>
#include <memory>
#include <vector>

#include "session.h"
#include "tracker.h"

#ifndef BNNCC_TVM_VERSION
#define BNNCC_TVM_VERSION "unknown"
#endif

namespace {

constexpr int kHandshakeSeconds = 10, kGraceSeconds = 2, kTickMilliseconds = 2000, kMaxKey = 256;
constexpr size_t kMaxNewcomers = 16;

struct Options {
  std::string host = "127.0.0.1", tracker_host, key;
  int port = 9090, tracker_port = 0, timeout = 600;
};

constexpr char kUsage[] =
    "usage: rpc_server [options]\n"
    "  --port N             port to listen on (9090); 0 takes a free one\n"
    "  --host ADDRESS       address to listen on (127.0.0.1); 0.0.0.0 is every one: whoever can\n"
    "                       connect can run code here\n"
    "  --tracker HOST:PORT  TVM RPC tracker to report to; clients then come from there only\n"
    "  --key K              name of this kind of device at the tracker\n"
    "  --timeout SECONDS    drop a client that says nothing for so long (600)\n";

[[noreturn]] void Refuse(const std::string& what) {
  fprintf(stderr, "error: %s\n\n%s", what.c_str(), kUsage);
  exit(2);
}

int Number(const std::string& text, const char* option, int low, int high) {
  char* end = nullptr;
  const long value = strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != 0 || value < low || value > high)
    Refuse(std::string(option) + " takes a number from " + std::to_string(low) + " to " +
           std::to_string(high) + ", not `" + text + "`");
  return static_cast<int>(value);
}

Options Parse(int argc, char** argv) {
  static const option kLong[] = {
      {"port", required_argument, nullptr, 'p'},    {"host", required_argument, nullptr, 'o'},
      {"tracker", required_argument, nullptr, 't'}, {"key", required_argument, nullptr, 'k'},
      {"timeout", required_argument, nullptr, 'i'}, {"help", no_argument, nullptr, 'h'},
      {nullptr, 0, nullptr, 0}};
  Options result;
  for (int c; (c = getopt_long(argc, argv, "", kLong, nullptr)) != -1;) {
    const std::string value = optarg ? optarg : "";
    const size_t colon = value.rfind(':');
    switch (c) {
      case 'p': result.port = Number(value, "--port", 0, 65535); break;
      case 'o': result.host = value; break;
      case 'i': result.timeout = Number(value, "--timeout", 1, 1000000); break;
      case 'k': result.key = value; break;
      case 't':
        if (colon == std::string::npos || colon == 0) Refuse("--tracker takes HOST:PORT");
        result.tracker_host = value.substr(0, colon);
        result.tracker_port = Number(value.substr(colon + 1), "--tracker", 1, 65535);
        break;
      case 'h': fputs(kUsage, stdout); exit(0);
      default: fputs(kUsage, stderr); exit(2);
    }
  }
  if (optind < argc) Refuse(std::string("unknown argument `") + argv[optind] + "`");
  for (const char c : result.key)
    if (!isalnum(static_cast<unsigned char>(c)) && !strchr("._-", c))
      Refuse("--key takes letters, digits, `.`, `_` and `-`");
  if (!result.tracker_host.empty() && result.key.empty()) Refuse("--tracker needs --key");
  return result;
}

int g_wake = -1;  // written to by signal handlers

void Wake(int number) {
  const char byte = static_cast<char>(number);
  if (write(g_wake, &byte, 1) < 0) return;
}

// Somebody who connected and has not said all of "magic, size, key" yet.
struct Newcomer {
  int fd;
  std::string peer, said;
  time_t until;
};

class Server {
 public:
  Server(const Options& options, int listening, int port, int wake)
      : options_(options), listening_(listening), wake_(wake) {
    if (!options.tracker_host.empty()) {
      const bool everywhere = options.host == "0.0.0.0" || options.host == "::";
      tracker_ = std::make_unique<Tracker>(options.tracker_host, options.tracker_port, options.key,
                                           everywhere ? "" : options.host, port);
    }
  }

  // Returns the signal that asked to end.
  int Run() {
    for (time_t announced = 0;;) {
      if (tracker_ && child_ == 0 && (time(nullptr) - announced) * 1000 >= kTickMilliseconds) {
        tracker_->Announce();
        announced = time(nullptr);
      }
      std::vector<pollfd> wanted = {{wake_, POLLIN, 0}, {listening_, POLLIN, 0}};
      for (const Newcomer& n : newcomers_) wanted.push_back({n.fd, POLLIN, 0});
      const size_t known = wanted.size();
      if (child_ != 0 && gone_since_ == 0) wanted.push_back({client_, POLLRDHUP, 0});
      poll(wanted.data(), wanted.size(), gone_since_ == 0 ? kTickMilliseconds : 200);
      if (wanted.size() > known && wanted[known].revents != 0) gone_since_ = time(nullptr);
      // In the middle of a long call the session does not notice that nobody waits any more.
      if (gone_since_ != 0 && time(nullptr) - gone_since_ > kGraceSeconds) kill(-child_, SIGKILL);
      for (char number; read(wake_, &number, 1) == 1;) {
        if (number == SIGCHLD) continue;
        End(child_, SIGKILL);
        return number;
      }
      if (Reap()) announced = 0;  // free again: tell the tracker at once
      size_t i = 2;
      for (auto n = newcomers_.begin(); n != newcomers_.end();)
        n = Heard(*n, wanted[i++].revents != 0) ? std::next(n) : newcomers_.erase(n);
      if (wanted[1].revents != 0) Accept();
    }
  }

 private:
  void Accept() {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    const int fd = accept4(listening_, reinterpret_cast<sockaddr*>(&address), &size,
                           SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    if (newcomers_.size() >= kMaxNewcomers) {
      close(fd);
      return;
    }
    newcomers_.push_back({fd, net::Peer(address, size), "", time(nullptr) + kHandshakeSeconds});
  }

  // Reads on; returns whether there is more to wait for.
  bool Heard(Newcomer& n, bool ready) {
    const size_t head = 2 * sizeof(int32_t);
    while (ready) {
      int32_t numbers[2] = {0, 0};
      memcpy(numbers, n.said.data(), std::min(n.said.size(), head));
      size_t wanted = head;
      if (n.said.size() >= head) {
        if (numbers[0] != net::kMagic || numbers[1] < 0 || numbers[1] > kMaxKey) break;
        wanted += static_cast<size_t>(numbers[1]);
        if (n.said.size() == wanted) {
          Greet(n, n.said.substr(head));
          return false;
        }
      }
      char buffer[head + kMaxKey];
      const ssize_t got = recv(n.fd, buffer, wanted - n.said.size(), 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) ready = false;
      else if (got <= 0) break;
      else n.said.append(buffer, static_cast<size_t>(got));
    }
    if (!ready && time(nullptr) <= n.until) return true;
    close(n.fd);
    return false;
  }

  // Answers a client that has said its key, and begins its session if it may have one.
  void Greet(const Newcomer& n, const std::string& hello) {
    fcntl(n.fd, F_SETFL, 0);
    net::LimitTime(n.fd, kHandshakeSeconds, kHandshakeSeconds);
    const std::string key = hello.substr(0, hello.find(' '));
    const std::string plain = key.rfind("client:", 0) == 0 ? key.substr(7) : "";
    const bool known = key.rfind("client:", 0) == 0 &&
                       (tracker_ ? tracker_->Matches(plain) : plain.empty() || plain == options_.key);
    if (child_ != 0) {
      const std::string since = std::to_string(time(nullptr) - since_);
      Answer(n.fd, net::kBusy, "for " + since + " s with a client at " + peer_);
    } else if (!known) {
      Answer(n.fd, net::kMismatch, "");
    } else if (Answer(n.fd, net::kMagic, "server:" + options_.key)) {
      const size_t limit = hello.find("-timeout=");
      const double seconds = limit == std::string::npos ? 0 : atof(hello.c_str() + limit + 9);
      Begin(n, seconds > 0 && seconds < 1e8 ? static_cast<unsigned>(seconds) + 1 : 0);
      return;
    }
    close(n.fd);
  }

  static bool Answer(int fd, int32_t code, const std::string& text) {
    return net::SendAll(fd, &code, sizeof code) &&
           (code == net::kMismatch || net::SendText(fd, text));
  }

  void Begin(const Newcomer& n, unsigned whole_seconds) {
    const pid_t server = getpid();
    const pid_t child = fork();
    if (child == 0) {
      close(listening_), close(wake_), close(g_wake);
      if (tracker_) tracker_->CloseInChild();
      for (const Newcomer& other : newcomers_)
        if (other.fd != n.fd) close(other.fd);
      if (getppid() != server) _exit(1);
      session::Serve(n.fd, options_.timeout, whole_seconds);
    }
    if (child < 0) {
      perror("fork");
      close(n.fd);
      return;
    }
    setpgid(child, child);
    child_ = child, client_ = n.fd, peer_ = n.peer, since_ = time(nullptr), gone_since_ = 0;
    if (tracker_) tracker_->Taken();
    printf("%s: session begins\n", peer_.c_str());
  }

  // Clears up after a session that has ended; returns whether one has.
  bool Reap() {
    int status = 0;
    if (child_ == 0 || waitpid(child_, &status, WNOHANG) != child_) return false;
    kill(-child_, SIGKILL);  // what the client's code may have started
    std::string how = "ended";
    if (WIFSIGNALED(status) && gone_since_ != 0) {
      how = "lost its client";
    } else if (WIFSIGNALED(status)) {
      const int number = WTERMSIG(status);
      how = number == SIGALRM ? "took longer than the client allowed"
                              : std::string("crashed: ") + strsignal(number);
    } else if (WEXITSTATUS(status) == session::kLostClient) {
      how = "lost its client";
    } else if (WEXITSTATUS(status) != 0) {
      how = "failed";
    }
    printf("%s: session %s\n", peer_.c_str(), how.c_str());
    if (WIFSIGNALED(status)) {
      try {  // the client still waits for an answer
        net::LimitTime(client_, 1, 1);
        tvm::ffi::Function::GetGlobalRequired("rpc.ReturnException")(
            static_cast<int64_t>(client_), "bnncc: the session " + how);
      } catch (const std::exception&) {
      }
    }
    close(client_);
    child_ = 0, client_ = -1, gone_since_ = 0;
    return true;
  }

  static void End(pid_t child, int number) {
    if (child == 0) return;
    kill(-child, number), kill(child, number);
    waitpid(child, nullptr, 0);
  }

  Options options_;
  int listening_, wake_;
  std::unique_ptr<Tracker> tracker_;
  std::list<Newcomer> newcomers_;
  pid_t child_ = 0;
  int client_ = -1;
  std::string peer_;
  time_t since_ = 0, gone_since_ = 0;  // when it began; when its client hung up
};

}  // namespace

int main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  setvbuf(stdout, nullptr, _IOLBF, 0);
  // Linkers may drop it, for what it registers is not called from here.
  if (dlopen("libtvm_runtime.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    fprintf(stderr, "error: %s\n", dlerror());
    return 1;
  }
  // Only MetaSchedule's runner needs it, for random data; a kit without it works too.
  dlopen("libtvm_runtime_extra.so", RTLD_NOW | RTLD_GLOBAL);
  try {
    session::OfferFunctions(BNNCC_TVM_VERSION);
  } catch (const std::exception& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  const int listening = net::Listen(options.host, options.port);
  if (listening < 0) {
    fprintf(stderr, "error: cannot listen on %s:%d: %s\n", options.host.c_str(), options.port,
            strerror(errno));
    return 1;
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return perror("pipe"), 1;
  fcntl(listening, F_SETFL, O_NONBLOCK);
  g_wake = ends[1];
  signal(SIGPIPE, SIG_IGN);
  for (const int number : {SIGCHLD, SIGTERM, SIGINT}) {
    struct sigaction action{};
    action.sa_handler = Wake;
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  }
  const int port = net::LocalPort(listening);
  printf("listening on %s:%d\n", options.host.c_str(), port);
  const int number = Server(options, listening, port, ends[0]).Run();
  printf("stopped by %s\n", strsignal(number));
  return 0;
}
