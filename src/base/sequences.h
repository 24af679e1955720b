/* base/sequences.h: finds which of several packed sequences a row belongs to, on the host and in kernels. */
#ifndef TE__SEQUENCES_H
#define TE__SEQUENCES_H

/* Returns the index of the last sequence that begins at or before `row`, or 0. `starts` has the first rows of the n
 * sequences. Wrong starts are not checked, but the result is always in 0 .. n - 1. */
TE__BOTH int te__sequence_of(const int *starts, int n, long long row) {
    int first = 0, last = n - 1;
    while (first < last) {
        const int middle = first + (last - first + 1) / 2;
        if (starts[middle] <= row) first = middle;
        else last = middle - 1;
    }
    return first;
}

#endif
