/* tests/model/test_gate.c: the gates of a mixture of experts (api/experts.h) against the formulas written down again. */
#include "../te_test.h"
