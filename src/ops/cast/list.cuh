// ops/cast/list.cuh: finds the state of delayed scaling that a slot (one column of a history, with its scale) belongs
// to. It knows the layout of te__delayed_kargs.
#pragma once
#include "device/base.cuh"
#include "ops/cast/kargs.h"

// Returns the state i of the slot: first[i] <= slot < first[i + 1]. `first` lies in constant memory.
TE_DEV int te_state_of(const te__delayed_kargs &a, te_u32 slot) {
    int low = 0, high = a.states - 1;
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        if (a.first[middle] <= slot) low = middle;
        else high = middle - 1;
    }
    return low;
}
