/* base/sequences.h: finds the sequence to which a row of packed sequences belongs. The host and kernels compile this
 * header. It depends on nothing but the starts of the sequences. */
#ifndef TE__SEQUENCES_H
#define TE__SEQUENCES_H

/* Returns the index of the last sequence that begins at or before `row`; 0 for a row before all sequences. starts[0 ..
 * n - 1] are the first rows of the n sequences. The result is in 0 .. n - 1 even for wrong starts, which are not
 * checked on a GPU. */
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
