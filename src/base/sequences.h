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

/* Finds where token i of the new tokens of sequence b goes in a cache of `pages` pages of page_size rows: *page and
 * *row. Sequence b has cu[b + 1] - cu[b] new tokens, and start[b] old ones. table has pages_of_each pages of each
 * sequence; NULL: page b is that of sequence b. Returns false if there is no such token or no place for it. */
TE__BOTH bool te__cache_place(const int *cu, const int *start, const int *table, int pages_of_each, int page_size,
                              int pages, int b, long long i, long long *page, long long *row) {
    const long long to = i + start[b];
    if (i < 0 || i >= (long long)cu[b + 1] - cu[b]) return false;
    if (to < 0 || to >= (long long)page_size * pages_of_each) return false;
    *page = table ? table[(long long)b * pages_of_each + to / page_size] : b;
    *row = to % page_size;
    return *page >= 0 && *page < pages;
}

#endif
