// Ctrl-C and its like, caught so that what goes on can be ended in good order.
#include "tools/stop_signals.h"

#include <signal.h>

namespace fretsaw {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};
volatile sig_atomic_t caught_signal = 0;

void remember(int number);

void restore() {
  for (const int signal : kSignals) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == remember) ::signal(signal, SIG_DFL);
  }
}

void remember(int number) {
  caught_signal = number;
  restore();
}

}  // namespace

StopSignals::StopSignals() {
  caught_signal = 0;
  struct sigaction action {};
  action.sa_handler = remember;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : kSignals) {
    struct sigaction before {};
    if (::sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue;  // as under nohup
    ::sigaction(signal, &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  restore();
}

int StopSignals::caught() {
  return caught_signal;
}

}  // namespace fretsaw
