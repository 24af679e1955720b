// ops/optim/multi.cuh: many tensors in one launch: finds the tensor of a chunk. Knows the tables' layout; must not know
// the elements.
#pragma once
#include "device/base.cuh"

// Returns the last i with first[i] <= chunk. The table lies in the constant bank: every thread of a block reads the
// same entries.
TE_DEV int te_tensor_of(const te_u32 *first, int tensors, te_u32 chunk) {
    int low = 0, high = tensors - 1;
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        if (first[middle] <= chunk) low = middle;
        else high = middle - 1;
    }
    return low;
}
