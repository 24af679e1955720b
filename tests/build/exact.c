/* exact.c: is arithmetic as it is written, as compiled here? Exit status 0: yes. */
#include <stdbool.h>
#include <stdint.h>
#include "base/common.h"
#include "base/numbers.h"
#include "sys/floats.c"

int main(void) { return te__arithmetic_is_exact() ? 0 : 1; }
