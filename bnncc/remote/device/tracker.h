// Reports this device to a TVM RPC tracker whenever it is free.
#pragma once

#include <ctime>
#include <random>
#include <string>

#include "net.h"

class Tracker {
 public:
  // `address` is what clients are told to connect to; empty: whatever the tracker sees us as.
  Tracker(std::string host, int port, std::string key, std::string address, int own_port)
      : host_(std::move(host)), port_(port), key_(std::move(key)), own_port_(own_port),
        address_(address.empty() ? "null" : "\"" + address + "\"") {}

  // Keeps the tracker informed; to be called every second or two while the device is free.
  // A key that was handed out and not used for a while is replaced: its client has died.
  void Announce() {
    if (fd_ < 0 && !Connect()) return;
    if (match_.empty()) {
      if (!Put()) Drop();
      return;
    }
    std::string pending;
    if (!Ask("[7]", &pending)) return Drop();
    unused_ = pending.find('"' + match_ + '"') == std::string::npos ? unused_ + 1 : 0;
    if (unused_ > kPatience && !Put()) Drop();
  }

  // Whether a client with this key comes from the tracker.
  bool Matches(const std::string& key) const { return !match_.empty() && key == match_; }

  // The key was used: the next client gets another.
  void Taken() { match_.clear(); }

  void CloseInChild() {
    if (fd_ >= 0) close(fd_);
  }

 private:
  static constexpr int kPatience = 3, kSeconds = 5;

  bool Connect() {
    fd_ = net::Connect(host_, port_, kSeconds);
    int32_t magic = net::kTrackerMagic;
    std::string reply;
    const bool ok = fd_ >= 0 && net::SendAll(fd_, &magic, sizeof magic) &&
                    net::ReceiveAll(fd_, &magic, sizeof magic) && magic == net::kTrackerMagic &&
                    Ask("[5, {\"key\": \"server:" + key_ + "\", \"addr\": [" + address_ + ", " +
                            std::to_string(own_port_) + "]}]",
                        &reply);
    if (!ok) Drop();
    if (ok != was_there_) printf("tracker %s:%d: %s\n", host_.c_str(), port_, ok ? "found" : "lost");
    was_there_ = ok;
    return ok;
  }

  bool Put() {
    static std::mt19937_64 random(std::random_device{}());
    match_ = key_ + ":" + std::to_string(random());
    unused_ = 0;
    std::string reply;
    return Ask("[3, \"" + key_ + "\", [" + std::to_string(own_port_) + ", \"" + match_ + "\"], " +
                   address_ + "]",
               &reply);
  }

  bool Ask(const std::string& question, std::string* reply) {
    return net::SendText(fd_, question) && net::ReceiveText(fd_, reply);
  }

  void Drop() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
    match_.clear();
  }

  std::string host_;
  int port_;
  std::string key_;
  int own_port_;
  std::string address_, match_;
  int fd_ = -1, unused_ = 0;
  bool was_there_ = true;
};
