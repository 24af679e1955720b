/* base/sequences.h: which of the sequences that lie behind each other a row belongs to. Read by the host and by
 * kernels: knows starts alone. */
#ifndef TE__SEQUENCES_H
#define TE__SEQUENCES_H

/* The last of n sequences that begins at or before `row`, by starts[0 .. n - 1]; 0 for a row before all. Whatever the
 * starts are, the result is one of the n: no one has checked them on a GPU. */
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
