// Ctrl-C and its like, caught so that what goes on can be ended in good order.
#pragma once

namespace fretsaw {

// While it lives, the first SIGINT or SIGTERM is only remembered. The next one ends the process, as it does without this. One at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  static int caught();  // the signal's number; 0: none
};

}  // namespace fretsaw
