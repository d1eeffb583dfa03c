// The fretsaw command.
#include "tools/commands.h"

int main(int argc, char** argv) {
  return fretsaw::run_command_line(argc, argv);
}
