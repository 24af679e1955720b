/* ops/context/kargs.h: kernel arguments for sequences that are split among ranks, and the rule of which rank has which
 * token. */
#ifndef TE__CONTEXT_KARGS_H
#define TE__CONTEXT_KARGS_H

#define TE__CONTEXT_THREADS 1024

typedef struct te__context_rows_kargs {
    const int *cu;              /* [sequences + 1]: cumulative lengths; NULL: all sequences have one length */
    int *map;                   /* [rows] */
    long long rows;             /* rows of all ranks together */
    long long sequences, share; /* cu counts `share` times as many rows */
    int ranks, inverse;
} te__context_rows_kargs;

typedef struct te__context_lengths_kargs {
    const int *cu, *padded; /* [sequences + 1] */
    int *out, *starts;      /* [sequences + 1] */
    long long sequences;
    int ranks, rank, chunks;
} te__context_lengths_kargs;

/* The arguments of context_merge.cu. A row of x, o or lse has three indices: sequence, place in the sequence, head. */
typedef struct te__context_merge_kargs {
    const void *x;
    void *o;
    const float *x_lse, *x_max; /* x_lse NULL: x is added to o unscaled; x_max NULL: there are no maxima to merge */
    float *lse, *largest;
    long long size[3], x_stride[3], o_stride[3], lse_stride[3]; /* for sequence, place, head */
    int d, x_dt, o_dt;
} te__context_merge_kargs;

/* Sets *rank to the rank that has row w, and *local to the row's index on that rank. w counts the rows of all
 * sequences, one sequence after the other. Rows behind the last sequence are divided evenly among the ranks. Returns
 * false if the lengths cannot be split. On a GPU the lengths have not been checked. If the result is false, the kernel
 * leaves row w where it is. */
TE__BOTH bool te__context_place(const te__context_rows_kargs *a, long long w, long long *rank, long long *local) {
    const long long each = a->rows / a->ranks;
    const long long end = a->cu ? a->cu[a->sequences] / a->share : a->rows;
    long long start, length, chunk, c;
    if (w >= end) {
        const long long first = end / a->ranks, tail = each - first;
        if (first < 0 || tail <= 0) return false;
        *rank = (w - end) / tail;
        *local = first + (w - end) % tail;
    } else {
        if (a->cu) {
            const int b = te__sequence_of(a->cu, (int)a->sequences, w * a->share);
            start = a->cu[b] / a->share;
            length = a->cu[b + 1] / a->share - start;
        } else {
            length = a->rows / a->sequences;
            start = w / length * length;
        }
        chunk = length / (2 * a->ranks);
        if (chunk <= 0 || chunk * 2 * a->ranks != length || start < 0 || w < start) return false;
        c = (w - start) / chunk;
        *rank = c < a->ranks ? c : 2 * a->ranks - 1 - c;
        *local = start / a->ranks + (c < a->ranks ? 0 : chunk) + (w - start) % chunk;
    }
    return *rank >= 0 && *rank < a->ranks && *local >= 0 && *local < each;
}

/* Returns the number of tokens of sequence b in the chunks that `chunks` selects. Sets *start to the row where they
 * begin. */
TE__BOTH int te__context_length(const te__context_lengths_kargs *a, long long b, int *start) {
    const int length = a->cu[b + 1] - a->cu[b], from = a->padded[b], chunk = (a->padded[b + 1] - from) / (2 * a->ranks);
    const int first = length - a->rank * chunk, second = length - (2 * a->ranks - 1 - a->rank) * chunk;
    const int in_first = first < 0       ? 0
                         : first < chunk ? first
                                         : chunk,
              in_second = second < 0       ? 0
                          : second < chunk ? second
                                           : chunk;
    *start =
        a->chunks == (int)TE_CHUNKS_UP_TO ? from : from / a->ranks + (a->chunks == (int)TE_CHUNKS_SECOND ? chunk : 0);
    if (a->chunks == (int)TE_CHUNKS_UP_TO) return length < a->rank * chunk ? length : a->rank * chunk;
    return (a->chunks == (int)TE_CHUNKS_SECOND ? 0 : in_first) + (a->chunks == (int)TE_CHUNKS_FIRST ? 0 : in_second);
}

/* Returns log(exp(a) + exp(b)). Sets *of_a to exp(a - result), *of_b to exp(b - result): the factors of two partial
 * softmaxes. A part without keys (-inf) has the factor 0. */
TE__BOTH float te__context_lse(float a, float b, float *of_a, float *of_b) {
    const float top = a > b ? a : b;
    float sum;
    *of_a = *of_b = 0.0f;
    if (top < -3.402823466e+38f) return top;
    sum = top + log1pf(expf((a > b ? b : a) - top));
    *of_a = expf(a - sum);
    *of_b = expf(b - sum);
    return sum;
}

#endif
