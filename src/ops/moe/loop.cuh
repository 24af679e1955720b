// ops/moe/loop.cuh: included by every kernel of this family: how its loops are compiled.
//
// Embedded PTX (te_ptx defines TE_SMALL) is a part of te.h: there a loop's body stands once, and rows are read element by element.
#pragma once
#include "device/base.cuh"
#include "ops/moe/kargs.h"
#ifdef TE_SMALL
#define TE_LOOP _Pragma("unroll 1")
#define TE_LOOP4 _Pragma("unroll 1")
#define TE_WIDE(vector) 0
#else
#define TE_LOOP
#define TE_LOOP4 _Pragma("unroll 4")
#define TE_WIDE(vector) (vector)
#endif
