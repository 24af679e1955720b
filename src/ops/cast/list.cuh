// ops/cast/list.cuh: finds the state of delayed scaling that a slot (one column of a history, with its scale) belongs
// to. This file knows the layout of te__delayed_kargs. It must not depend on what a slot is used for.
#pragma once
#include "device/base.cuh"
#include "ops/cast/kargs.h"

// Returns the state i that the slot belongs to, with first[i] <= slot < first[i + 1]. `first` is a part of the kernel's
// argument, so it lies in constant memory.
TE_DEV int te_state_of(const te__delayed_kargs &a, te_u32 slot) {
    int low = 0, high = a.states - 1;
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        if (a.first[middle] <= slot) low = middle;
        else high = middle - 1;
    }
    return low;
}
