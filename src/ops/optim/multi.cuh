// ops/optim/multi.cuh: finds the tensor of a chunk, for launches over many tensors. This file must not depend on what
// the tensors hold.
#pragma once
#include "device/base.cuh"

// Returns the last i with first[i] <= chunk. `first` lies in constant memory, and all threads of a block read the same
// entries.
TE_DEV int te_tensor_of(const te_u32 *first, int tensors, te_u32 chunk) {
    int low = 0, high = tensors - 1;
    while (low < high) {
        int middle = (low + high + 1) >> 1;
        if (first[middle] <= chunk) low = middle;
        else high = middle - 1;
    }
    return low;
}
