/* base/sequences.h: finds the sequence to which a row of packed sequences belongs. Read by the host and by kernels:
 * knows the starts of sequences alone. */
#ifndef TE__SEQUENCES_H
#define TE__SEQUENCES_H

/* Returns the last of n sequences that begins at or before `row`, by starts[0 .. n - 1]; 0 for a row before all of
 * them. The result is in 0 .. n - 1 for any starts, since on a GPU nobody has checked them. */
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
