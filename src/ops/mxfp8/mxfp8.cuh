// ops/mxfp8/mxfp8.cuh: says which elements each thread has in a block's tile of 32 rows and 256 columns. A group is the
// 32 elements of one scale. This file must not depend on formats.
//
//                256 columns: 8 a lane
//            +----+----+----+----+-  -+----+----+
//    warp 0  | 0  | 1  | 2  | 3  | .. | 30 | 31 |   4 rows a warp: a lane has 8 columns of 4 rows
//    warp 1  | 0  | 1  |                        |
//     ...    :                                  :   32 rows: a group of each column
//    warp 7  | 0  |                             |
//            +----+----+----+----+-  -+----+----+
//              a group of a row
//
// A warp reads or writes all 256 columns of a row at once. Tiles are small, so that many are in flight at a time.
#pragma once
#include "device/base.cuh"

#define TE_MX_ALL 0xffffffffu

struct te_mx_place {
    te_i64 first_row, first_col; // of the block's tile
    int lane, warp;
    te_i64 row, col; // the thread's first element

    // In the grid, x counts tiles along n, and y counts tiles along m. z continues the count of y.
    TE_DEV te_mx_place() {
        first_row = (te_i64)(blockIdx.z * gridDim.y + blockIdx.y) * TE__MX_ROWS,
        first_col = (te_i64)blockIdx.x * TE__MX_COLS;
        lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        row = first_row + warp * 4, col = first_col + lane * 8;
    }
};

// Returns how many of `size` rows or columns are left from `at` on, limited to 0 .. `most`.
TE_DEV int te_mx_left(te_i64 size, te_i64 at, int most) {
    te_i64 left = size - at;
    return left > most ? most : left < 0 ? 0 : (int)left;
}

// Returns the position of the scale of group `group` in line `line` (a row of x, or a column if columnwise).
//
// `lines` is the number of lines rounded up to 128. `groups` is the number of groups in a line rounded up to 4.
TE_DEV te_i64 te_mx_scale_at(te_i64 line, te_i64 group, te_i64 lines, te_i64 groups, bool columnwise, bool swizzled) {
    return te__group_scale_at(swizzled, columnwise, columnwise && !swizzled ? lines : groups, line, group);
}
