/* header.h: te.h as a file of its own that others may include. */
#include "te.h"
