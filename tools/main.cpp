// The fretsaw command.
#include <malloc.h>

#include <cstdio>
#include <cstdlib>

#include "runtime/session.h"
#include "tools/commands.h"

int main(int argc, char** argv) {
#ifdef __GLIBC__
  // Graphs of 100,000 nodes are millions of small blocks. glibc's lists of small free blocks are merged at every larger request, which
  // costs a sixth of the time of partitioning such a graph; without them the caches of each thread serve as well.
  mallopt(M_MXFAST, 0);
#endif
  const int code = fretsaw::run_command_line(argc, argv);
  if (fretsaw::must_exit_at_once()) {
    std::fflush(nullptr);
    std::_Exit(code);
  }
  return code;
}
